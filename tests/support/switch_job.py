"""A job inside the test's own process: a real controller, and control threads of ranks that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import msgspec

from lastgasp.gasp import messages as m
from lastgasp.gasp import operator as operator_module
from lastgasp.gasp.groups import pack
from lastgasp.gasp.link import Link
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.jobs.registry import card_of_this_process
from lastgasp.steps import bits
from lastgasp.topology import data_parallel
from support.fake_controller import HELLO, FakeSource
from support.waiting import until


def hello(rank: int, world: int, **more: object) -> m.Hello:
    """What a rank of this job says first."""
    return msgspec.structs.replace(HELLO, rank=rank, world_size=world, replicas=pack(data_parallel(world)), **more)


@dataclass
class RankHere:
    """The control thread of one rank, and the marks that it switches."""

    rank: int
    link: Link
    mask: int = bits.DEFAULT_ON
    marked: bool = True
    status: RankStatus = field(default_factory=RankStatus)

    def __post_init__(self) -> None:
        source = FakeSource()
        source.rank = self.rank
        self.processor = Processor(self.status, source, self.link, _nobody, (1.0, 5.0), lambda outcome: None)
        self.processor.on_switch = self.switch if self.marked else None
        self.processor.begin()
        self.processor.register(card_of_this_process(self.rank, "cpu", {"torch": "2.13.0"}))

    def switch(self, on: int, off: int) -> int:
        """As the port says."""
        self.mask = (self.mask | on) & ~off
        return self.mask


def _nobody(fault: object) -> m.Release:
    raise AssertionError("nobody recovers alone here")


@dataclass
class JobHere:
    """The controller and its ranks."""

    controller: ControllerThread
    ranks: list[RankHere]

    @property
    def address(self) -> str:
        """Of the controller."""
        return self.controller.endpoint.address

    @property
    def token(self) -> str:
        """Of the job."""
        return self.controller.endpoint.token

    def operator(self) -> OperatorLink:
        """Another operator."""
        return OperatorLink(self.address, self.token)

    def table(self) -> m.Ranks:
        """What `lastgasp ps` sees."""
        with self.operator() as link:
            return link.ranks()

    def until(self, condition: Callable[[m.Ranks], bool]) -> m.Ranks:
        """The table, once it is as it should be."""
        found: list[m.Ranks] = []

        def holds() -> bool:
            found[:] = [self.table()]
            return condition(found[0])

        until(holds, "the table of ranks to be as it should be")
        return found[0]


@contextmanager
def job_here(world: int, *, joined: int | None = None, job: str = "job", marked: bool = True) -> Iterator[JobHere]:
    """A job of `world` ranks, of which the first `joined` are there (all by default); its operators are patient."""
    with ExitStack() as stack:
        for limit in ("REACH", "MARGIN"):
            stack.enter_context(mock.patch.object(operator_module, limit, 60.0))
        controller = ControllerThread(new_token())
        stack.callback(controller.stop)
        ranks = []
        for number in range(world if joined is None else joined):
            link = Link(controller.endpoint.address, controller.endpoint.token, hello(number, world, job=job))
            stack.callback(link.close)
            ranks.append(rank := RankHere(number, link, marked=marked))
            stack.callback(rank.processor.close, goodbye=True)
        yield JobHere(controller, ranks)
