"""A launcher sends the newest copies in its ranks' arenas to its partner host, so that they outlive this one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lastgasp import __version__, _clock, arena
from lastgasp.arena import DamagedArena
from lastgasp.errors import ControlError, DeadlineExceeded, LastgaspError

from . import messages as m
from .buddy_receiver import HELD
from .link import SEND_TIMEOUT, Channel
from .operator import NOBODY

log = logging.getLogger("lastgasp.launch")

REACH = 5.0
"""Seconds for one try to reach the partner."""
ROOM = 120.0
"""Seconds for it to take the memory."""
AGAIN = 1.0
"""Seconds between two tries."""
LOOK = 0.05
"""Seconds between two looks at the arenas' headers."""
MISSED = 3
"""Rounds in a row that came to nothing, after which people are told."""


@dataclass(frozen=True)
class Source:
    """A rank's arena: our own descriptor of it."""

    fd: int
    identity: bytes


class _SenderLink(Channel):
    """The sender's end of the connection."""

    peer = "receiver"

    def __init__(self, address: str, token: str, pair: int) -> None:
        super().__init__(address, REACH, retry=False)
        hello = m.Sender(protocol=m.PROTOCOL, version=__version__, nonce=b"", mac=b"", pair=pair)
        self._greet(token, "sender", NOBODY, hello)

    def ask(self, message: m.Message, seconds: float = SEND_TIMEOUT) -> m.Took:
        """Send it, and wait for the answer."""
        self.send(message)
        self._deadline = _clock.monotonic() + seconds
        return self._expect(m.Took)

    def stream(self, fd: int, found: arena.Found, stop: threading.Event) -> m.Took:
        """Send a payload as it lies there now; the receiver finds out whether it was overwritten meanwhile."""
        whole = memoryview(bytearray(min(arena.CHUNK, found.length)))
        at, end = found.at, found.at + found.length
        while at < end:
            if stop.is_set():
                raise EOFError("stopped")
            count = os.preadv(fd, [whole[: min(len(whole), end - at)]], at)
            if not count:
                raise EOFError("the arena has become shorter")
            self._socket.settimeout(SEND_TIMEOUT)
            self._socket.sendall(whole[:count])
            at += count
        self._deadline = _clock.monotonic() + SEND_TIMEOUT
        return self._expect(m.Took)


class Sender:
    """A thread; end it with `close`, which does not wait.

    It sends the newest step that all arenas hold for their buddy. While it is busy with one, newer ones go by: a slow
    network costs rounds, never a step of the training.

    Args:
        address: of the partner's receiver; token: the job's; pair: which it takes copies for.
        sources: the arenas, by rank; from here on the descriptors are the sender's.
        note: called, on this thread, with what people should know.
    """

    def __init__(
        self, address: str, token: str, pair: int, sources: Mapping[int, Source], note: Callable[[str], None]
    ) -> None:
        self._address, self._token, self._pair, self._note = address, token, pair, note
        self._sources = dict(sources)
        self._stop = threading.Event()
        self._link: _SenderLink | None = None
        self._offered: tuple[int, ...] = ()
        self._last = self._arrived = -1
        self._missed, self._told = 0, False
        threading.Thread(target=self._run, name="lastgasp-buddy-send", daemon=True).start()

    def close(self) -> None:
        """End it: within the deadlines of what it does now. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK):
                common = set.intersection(*(self._waiting(one) for one in self._sources.values()))
                step = max(common, default=-1)
                if step > self._last and not self._round(step):
                    self._stop.wait(AGAIN)
        except Exception:
            log.exception("copies do not go to the partner host any more")
        finally:
            self._disconnect()
            for one in self._sources.values():
                os.close(one.fd)

    @staticmethod
    def _waiting(one: Source) -> set[int]:
        return set(arena.steps(one.fd, one.identity, buddy=True))

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.close()

    def _round(self, step: int) -> bool:
        """Send that step of all arenas; False if it is to be tried again later."""
        try:
            if self._link is None:
                self._link, self._offered = _SenderLink(self._address, self._token, self._pair), ()
            if not self._has_room(self._link, step):
                return True
            came = [self._sent(self._link, rank, one, step) for rank, one in self._sources.items()]
        except (OSError, EOFError, LastgaspError) as error:  # TLS's are OSErrors
            log.debug("step %d has not come to the partner host: %s", step, error)
            self._disconnect()
            why = f"no answer in {error.seconds:g} s" if isinstance(error, DeadlineExceeded) else error
            self._missing(f"its partner host at {self._address} cannot be reached ({why})")
            return False
        self._last = step
        if all(came):
            self._arrived = step
            if self._told:
                self._note(f"copies of the arenas of ranks {self._names()} arrive at their partner host again, "
                           f"of step {step}")  # fmt: skip
            self._missed, self._told = 0, False
        else:
            self._missing("they are overwritten before they are sent: LASTGASP_BUDDY should be a greater 'every N'")
        return True

    def _missing(self, why: str) -> None:
        self._missed += 1
        if self._missed >= MISSED and not self._told and not self._stop.is_set():
            self._told = True
            newest = f"the newest there is of step {self._arrived}" if self._arrived >= 0 else "there are none"
            self._note(f"copies of the arenas of ranks {self._names()} do not arrive at their partner host ({newest}), "
                       f"since {why}: the loss of their host costs the steps since the last that arrived, or since the "
                       "last checkpoint")  # fmt: skip

    def _names(self) -> str:
        return ", ".join(map(str, sorted(self._sources)))

    def _has_room(self, link: _SenderLink, step: int) -> bool:
        found = [arena.find(one.fd, one.identity, step) for one in self._sources.values()]
        if None in found:
            return False
        sizes = tuple(one.capacity for one in found if one is not None)
        if sizes == self._offered:
            return True
        identities = tuple(one.identity for one in self._sources.values())
        answer = link.ask(m.Offers(owners=tuple(self._sources), sizes=sizes, identities=identities), ROOM)
        if answer.full:
            self._note(f"{answer.why}: the loss of their host costs the steps since the last checkpoint")
            self._stop.set()
            return False
        if answer.why:
            raise ControlError(answer.why)
        self._offered = sizes
        return True

    def _sent(self, link: _SenderLink, rank: int, one: Source, step: int) -> bool:
        """Whether the partner holds that step of that rank now."""
        try:
            found = arena.find(one.fd, one.identity, step)
        except DamagedArena:
            found = None
        if found is None:
            return False
        answer = link.ask(m.Sends(rank=rank, step=step, length=found.length, digest=found.digest))
        if not answer.why:
            answer = link.stream(one.fd, found, self._stop)
        if answer.why == HELD:
            return True
        if answer.why:
            log.debug("step %d of rank %d has not come to the partner host: %s", step, rank, answer.why)
        return not answer.why
