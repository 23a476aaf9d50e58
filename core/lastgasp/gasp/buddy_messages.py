"""What launchers say about copies of arenas on partner hosts: to the controller, and to one another."""

from __future__ import annotations

from .wire import Message


class Listens(Message, frozen=True, kw_only=True):
    """Keeper: on this port my host takes copies of other hosts' arenas."""

    port: int


class Pair(Message, frozen=True, kw_only=True):
    """Controller, to a keeper: send the arenas of `owners` to the launcher at `address`; empty: to nobody any more.

    Copies of arenas that it keeps itself, of an earlier pair, it frees.
    """

    pair: int
    address: str = ""
    owners: tuple[int, ...] = ()


class Copied(Message, frozen=True, kw_only=True):
    """Keeper: these steps of the arena of another host's `rank` I have, verified, behind my descriptor `fd`."""

    pair: int
    rank: int
    steps: tuple[int, ...]
    pid: int
    fd: int
    identity: bytes


class Remarked(Message, frozen=True, kw_only=True):
    """Keeper: a note for the incident's record."""

    text: str


class Sender(Message, frozen=True, kw_only=True):
    """Launcher, to that of its partner host: the proof (in the role "sender", for rank -1), and for which pair."""

    protocol: int
    version: str
    nonce: bytes
    mac: bytes
    pair: int


class Offers(Message, frozen=True, kw_only=True):
    """Sender: I have arenas of these ranks, whose payloads may have so many bytes. Have you memory for them?"""

    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    identities: tuple[bytes, ...]


class Sends(Message, frozen=True, kw_only=True):
    """Sender: `length` bytes follow once you have agreed: the payload of `step` of that rank's arena."""

    rank: int
    step: int
    length: int
    digest: bytes


class Took(Message, frozen=True, kw_only=True):
    """Receiver: the answer to each of these. `why` says why not; `full`: because there is too little memory."""

    why: str = ""
    full: bool = False
