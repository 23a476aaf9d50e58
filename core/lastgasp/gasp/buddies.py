"""What a launcher does for copies on partner hosts: it sends its ranks' arenas to one, and keeps those of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from . import messages as m
from .buddy_receiver import Receiver
from .buddy_sender import Sender, Source


class Buddies:
    """Its threads do the network's work; no method waits for it.

    Args:
        token: the job's.
        copied: called, on another thread, whenever a step has come from the other host; note: with what people should
            know.
    """

    def __init__(self, token: str, copied: Callable[[m.Copied], None], note: Callable[[str], None]) -> None:
        self._token, self._copied, self._note = token, copied, note
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._paired: tuple[int, str] = (0, "")

    def listen(self, host: str) -> int:
        """The port on which copies are taken, at this address of ours.

        Raises:
            OSError: there is none.
            ConfigError: the TLS files.
        """
        if self._receiver is None:
            self._receiver = Receiver(host, self._token, self._copied)
        return self._receiver.port

    def pair(self, order: m.Pair, arenas: Mapping[int, tuple[int, bytes]]) -> None:
        """Carry out the order; one that is repeated changes nothing.

        Args:
            arenas: of this host's ranks: descriptor and identity.
        """
        if self._receiver is not None:
            self._receiver.expect(order.pair)
        if self._paired == (order.pair, order.address):
            return
        self._paired = order.pair, order.address
        if self._sender is not None:
            self._sender.close()
        known = [rank for rank in order.owners if rank in arenas]
        sources = {rank: Source(os.dup(arenas[rank][0]), arenas[rank][1]) for rank in known} if order.address else {}
        self._sender = Sender(order.address, self._token, order.pair, sources, self._note) if sources else None

    def held(self) -> list[m.Copied]:
        """The copies that are kept here."""
        return self._receiver.held() if self._receiver is not None else []

    def close(self) -> None:
        """Stop both, and free the copies. Idempotent."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
