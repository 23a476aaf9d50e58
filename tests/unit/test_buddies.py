"""Copies of arenas on a partner host: they count once verified, are never torn, and cost nobody anything but rounds."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trustme

from lastgasp import arena
from lastgasp.arena import Arena, verified
from lastgasp.gasp import buddy_receiver, buddy_sender
from lastgasp.gasp import messages as m
from lastgasp.gasp.buddies import Buddies
from lastgasp.gasp.partners import ring
from support.certificates import issue
from support.waiting import until

TOKEN = "a" * 64
BIG = 3 * arena.CHUNK + 77


class End:
    """One launcher's part, with what it says."""

    def __init__(self, token: str = TOKEN) -> None:
        self.copied, self.notes = list[m.Copied](), list[str]()
        self.buddies = Buddies(token, self.copied.append, self.notes.append)
        self.port = self.buddies.listen("127.0.0.1")

    def close(self) -> None:
        """As the launcher does."""
        self.buddies.close()

    def holds(self, rank: int) -> tuple[int, ...]:
        """The steps that it has copies of."""
        return next((one.steps for one in self.buddies.held() if one.rank == rank), ())


def filled(arena: Arena, step: int, size: int = BIG, buddy: bool = True) -> bytes:
    """Copy something into it that tells the step."""
    data = bytes([step % 251]) * (size - 9) + b"%09d" % step
    arena.slots = 4
    arena.reserve(size)
    arena.copy(step, [data], buddy=buddy)
    return data


def order(to: End, *owners: int, pair: int = 1) -> m.Pair:
    return m.Pair(pair=pair, address=f"127.0.0.1:{to.port}", owners=owners)


def known(*arenas: Arena) -> dict[int, tuple[int, bytes]]:
    return {rank: (one.fd, one.identity) for rank, one in enumerate(arenas)}


def read(copied: m.Copied, step: int) -> bytes:
    """As the saver does: by the launcher's descriptor."""
    fd = os.open(f"/proc/{copied.pid}/fd/{copied.fd}", os.O_RDONLY)
    try:
        with verified(fd, copied.identity, step) as payload:
            return bytes(payload)
    finally:
        os.close(fd)


@contextmanager
def two_hosts(ranks: int = 2) -> Iterator[tuple[End, End, list[Arena]]]:
    """The sender, the receiver, which is ready, and the sender's arenas."""
    arenas = [Arena() for _ in range(ranks)]
    with closing(End()) as sender, closing(End()) as receiver:
        receiver.buddies.pair(m.Pair(pair=1), {})
        yield sender, receiver, arenas
    while arenas:
        arenas.pop().close()


def test_what_arrives_is_what_was_copied_and_only_steps_for_the_buddy() -> None:
    with two_hosts() as (sender, receiver, arenas):
        data = [filled(one, 4, BIG + rank) for rank, one in enumerate(arenas)]
        filled(arenas[0], 5, buddy=False)
        sender.buddies.pair(order(receiver, 0, 1), known(*arenas))
        until(lambda: all(receiver.holds(rank) == (4,) for rank in (0, 1)), "step 4 is there")
        assert [read(one, 4) for one in sorted(receiver.buddies.held(), key=lambda one: one.rank)] == data
        more = filled(arenas[0], 8)
        filled(arenas[1], 8)
        until(lambda: all(receiver.holds(rank) == (8, 4) for rank in (0, 1)), "step 8 is there, too")
        assert read(receiver.copied[-2], 8) == more and receiver.copied[-2].rank == 0
        sender.buddies.pair(order(receiver, 0, 1), known(*arenas))  # repeated: nothing changes
        assert (sender.notes, receiver.notes) == ([], [])


def test_a_rank_that_lags_behind_holds_the_round_back() -> None:
    with two_hosts() as (sender, receiver, arenas):
        for one in arenas:
            filled(one, 4)
        filled(arenas[0], 8)
        sender.buddies.pair(order(receiver, 0, 1), known(*arenas))
        until(lambda: receiver.holds(1) == (4,), "step 4 is there")
        assert receiver.holds(0) == (4,)


def test_what_is_damaged_on_its_way_or_before_does_not_count() -> None:
    with two_hosts(1) as (sender, receiver, [one]):
        filled(one, 4)
        os.pwrite(one.fd, b"?", 3 * 4096)
        sender.buddies.pair(order(receiver, 0), known(one))
        data = filled(one, 8)
        until(lambda: receiver.holds(0) == (8,), "step 8 is there")
        assert read(receiver.copied[0], 8) == data and len(receiver.copied) == 1


def test_a_sender_that_breaks_off_leaves_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_sender, "AGAIN", 0.01)
    cut = threading.Event()
    sends = buddy_sender._SenderLink.stream

    def stream(self: buddy_sender._SenderLink, fd: int, found: arena.Found, stop: threading.Event) -> m.Took:
        if cut.is_set():
            self._socket.sendall(bytes(arena.CHUNK + 7))
            self._socket.shutdown(socket.SHUT_RDWR)
        return sends(self, fd, found, stop)

    monkeypatch.setattr(buddy_sender._SenderLink, "stream", stream)
    with two_hosts(1) as (sender, receiver, [one]):
        data = filled(one, 4)
        sender.buddies.pair(order(receiver, 0), known(one))
        until(lambda: receiver.holds(0) == (4,), "step 4 is there")
        cut.set()
        filled(one, 8)
        until(lambda: bool(sender.notes), "people are told")
        assert receiver.holds(0) == (4,) and read(receiver.copied[0], 4) == data
        assert "cannot be reached" in sender.notes[0] and "the loss of their host costs" in sender.notes[0]
        assert "(the newest there is of step 4)" in sender.notes[0]
        cut.clear()
        until(lambda: receiver.holds(0) == (8, 4), "it has come back")
        until(lambda: len(sender.notes) == 2, "people are told of that, too")
        assert "arrive at their partner host again, of step 8" in sender.notes[1]


def test_too_little_memory_is_told_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts(1) as (sender, receiver, [one]):
        filled(one, 4)
        monkeypatch.setattr(arena, "available", lambda: 2_000_000)
        sender.buddies.pair(order(receiver, 0), known(one))
        until(lambda: bool(sender.notes), "people are told")
        assert "ranks 0 need 3 MB on their partner host, and 2 MB of memory are available there" in sender.notes[0]
        assert receiver.buddies.held() == []


def test_strangers_and_other_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_sender, "AGAIN", 0.01)
    one, stranger = Arena(), End("b" * 64)
    filled(one, 4)
    with two_hosts(1) as (sender, receiver, [own]), closing(stranger):
        filled(own, 4)
        waiting = [socket.create_connection(("127.0.0.1", receiver.port)) for _ in range(buddy_receiver.STRANGERS + 3)]
        stranger.buddies.pair(order(receiver, 0), known(one))
        until(lambda: bool(stranger.notes), "the stranger is not let in")
        sender.buddies.pair(order(receiver, 0, pair=2), known(own))
        until(lambda: bool(sender.notes), "nor is who belongs to another pair")
        for each in waiting:
            each.close()
        assert receiver.buddies.held() == []
        sender.buddies.pair(order(receiver, 0), known(own))
        until(lambda: receiver.holds(0) == (4,), "its own partner is")
    one.close()


def test_with_tls_a_host_without_a_certificate_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_sender, "AGAIN", 0.01)
    variables = issue(tmp_path / "tls", trustme.CA(), "node-0")
    with monkeypatch.context() as secured:
        for name, value in variables.items():
            secured.setenv(name, value)
        with two_hosts(1) as (sender, receiver, [one]):
            data = filled(one, 4)
            sender.buddies.pair(order(receiver, 0), known(one))
            until(lambda: receiver.holds(0) == (4,), "step 4 is there")
            assert read(receiver.copied[0], 4) == data
            for name in variables:
                secured.delenv(name)
            secured.setattr(buddy_sender, "REACH", 0.5)
            secured.setattr(buddy_sender, "MISSED", 1)
            plain = End()
            plain.buddies.pair(order(receiver, 0), known(one))
            until(lambda: bool(plain.notes), "who has no certificate is not let in")
            assert sender.notes == [] and len(receiver.copied) == 1
            plain.close()


def test_nothing_is_left() -> None:
    def open_arenas() -> int:
        gc.collect()
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(arena.NAME in os.readlink(link) for link in links if os.path.lexists(link))

    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("lastgasp-buddy")]

    until(lambda: not threads() and not open_arenas(), "those of other tests have ended")
    with two_hosts() as (sender, receiver, arenas):
        for step in (4, 8):
            for rank in range(len(arenas)):
                filled(arenas[rank], step)
        sender.buddies.pair(order(receiver, 0, 1), known(*arenas))
        until(lambda: receiver.holds(1) == (8,), "step 8 is there")
        receiver.buddies.pair(m.Pair(pair=2), {})
        assert receiver.buddies.held() == []
    until(lambda: not threads() and not open_arenas(), "all memory is free, and all threads have ended")


def test_each_host_sends_to_the_next_what_no_other_host_has() -> None:
    alone = ((0,), (1,), (2,), (3,))
    assert ring({0: "a", 1: "a", 2: "b", 3: "b"}, alone) == {"a": ("b", (0, 1)), "b": ("a", (2, 3))}
    assert ring({0: "a", 1: "b", 2: "c"}, alone[:3]) == {"a": ("b", (0,)), "b": ("c", (1,)), "c": ("a", (2,))}
    assert ring({0: "a", 1: "a", 2: "b", 3: "b"}, ((0, 2), (1,), (3,))) == {"a": ("b", (1,)), "b": ("a", (3,))}
    assert ring({0: "a", 1: "a"}, ((0,), (1,))) == {}
