"""Which host is told to send copies where, and what of what is said about them counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager

from lastgasp.gasp import messages as m
from lastgasp.gasp.keepers import Keepers
from lastgasp.gasp.partners import Partners

ALONE = ((0,), (1,), (2,))


class Launchers(Keepers):
    """Of other hosts; remembers what they are told."""

    def __init__(self) -> None:
        super().__init__(lambda rank, step: None)
        self.own_address, self.told = "127.0.0.1", list[tuple[str, m.Message]]()

    def send(self, host: str, message: m.Message) -> None:
        """As if it were connected."""
        self.told.append((host, message))

    def take(self) -> list[tuple[str, m.Message]]:
        """What was said since the last call."""
        told, self.told = self.told, []
        return told


@contextmanager
def controller() -> Iterator[tuple[Launchers, Partners, list[str]]]:
    """On host "a"."""
    launchers, notes = Launchers(), list[str]()
    partners = Partners(launchers, "a", "token", notes.append, lambda rank: None)
    with closing(partners):
        yield launchers, partners, notes


def copied(pair: int, *steps: int) -> m.Copied:
    return m.Copied(pair=pair, rank=1, steps=steps, pid=7, fd=8, identity=b"id")


async def paired(partners: Partners, launchers: Launchers) -> None:
    """Three hosts, whose ranks have all begun."""
    launchers.on_buddy("b", "10.0.0.2", m.Listens(port=5))
    for rank, host in enumerate("abc"):
        partners.begins(rank, host, 3, ALONE)
    assert launchers.take() == []  # nobody knows yet where the third one listens
    launchers.on_buddy("c", "10.0.0.3", m.Listens(port=6))


def test_each_host_is_told_once_all_are_known() -> None:
    async def run() -> None:
        with controller() as (launchers, partners, notes):
            await paired(partners, launchers)
            [(first, to_c), (second, to_a)] = launchers.take()
            assert (first, to_c) == ("b", m.Pair(pair=1, address="10.0.0.3:6", owners=(1,)))
            assert second == "c" and isinstance(to_a, m.Pair) and to_a.owners == (2,)
            assert to_a.address.startswith("127.0.0.1:")
            launchers.on_buddy("b", "10.0.0.2", m.Listens(port=5))  # its connection was lost meanwhile
            assert launchers.take() == [("b", to_c)]
            launchers.on_buddy("b", "10.0.0.2", m.Remarked(text="too little memory"))
            assert notes == ["too little memory"]

    asyncio.run(run())


def test_only_copies_of_the_pair_of_now_count() -> None:
    async def run() -> None:
        with controller() as (launchers, partners, _):
            await paired(partners, launchers)
            launchers.on_buddy("c", "10.0.0.3", copied(1, 8, 4))
            launchers.on_buddy("c", "10.0.0.3", copied(0, 12))
            assert partners.held() == {1: ("c", (8, 4))}
            assert partners.reference(1) == m.ArenaRef(rank=1, pid=7, fd=8, identity=b"id")
            assert partners.reference(0) == m.ArenaRef(rank=0)
            launchers.take()
            launchers.on_buddy("c", "10.0.0.3", m.Listens(port=9))  # another launcher, which has none of them
            told = dict(launchers.take())
            assert told["b"] == m.Pair(pair=2, address="10.0.0.3:9", owners=(1,)) and partners.held() == {}
            launchers.on_buddy("c", "10.0.0.3", copied(2, 16))
            partners.begin()  # another attempt
            assert launchers.take() == [("b", m.Pair(pair=3)), ("c", m.Pair(pair=3))] and partners.held() == {}
            launchers.on_buddy("c", "10.0.0.3", copied(2, 16))
            assert partners.held() == {}

    asyncio.run(run())
