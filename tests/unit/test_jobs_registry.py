"""Registration: what the card says, that it goes out once after the beginning, and that the end takes it back."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import __version__
from lastgasp.config import GaspConfig
from lastgasp.gasp import messages as m
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.jobs.registry import EmbeddedRegistry, WorkerRegistry, card_of_this_process
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, data_parallel
from support.fake_controller import STARTED_S, TOKEN, ConfirmingController, FakeController, FakeSource


def test_the_card_of_this_process() -> None:
    card = card_of_this_process(3, "npu:3", {"torch": "2.13.0"})
    assert (card.rank, card.node, card.pid, card.device) == (3, socket.gethostname(), os.getpid(), "npu:3")
    assert card.versions == {"lastgasp": __version__, "python": platform.python_version(), "torch": "2.13.0"}
    assert card.started_ns > 1e18


def test_any_text_can_travel() -> None:
    card = card_of_this_process(0, "device \udcff", {"framework \udcff": "\udcfe"})
    assert m.from_rank(m.frame(m.Register(card=card))[m.HEADER :]) == m.Register(card=card)


@contextmanager
def embedded() -> Iterator[tuple[FakeController, Processor]]:
    """A control thread and who it talks to."""
    with ConfirmingController() as controller:
        limits = (1.0, 5.0)
        processor = Processor(RankStatus(), FakeSource(), controller.link(), _nobody, limits, lambda outcome: None)
        try:
            yield controller, processor
        finally:
            processor.close(goodbye=False)


def _nobody(fault: object) -> m.Release:
    raise AssertionError("nobody recovers alone here")


def test_the_embedded_registry_says_it_to_the_controller() -> None:
    card = card_of_this_process(1)
    with embedded() as (controller, processor):
        registry: WorkerRegistry = EmbeddedRegistry(processor)
        registry.register(card)
        assert controller.hear(m.Register).card == card
        registry.deregister()
        controller.hear(m.Goodbye)
        registry.deregister()
        processor.close(goodbye=True)
        with pytest.raises(EOFError):
            controller.next()  # one goodbye is enough


def test_without_a_controller_nothing_happens() -> None:
    with embedded() as (controller, processor):
        controller.hang_up()
        registry = EmbeddedRegistry(processor)
        registry.register(card_of_this_process(1))
        registry.deregister()
        registry.register(card_of_this_process(1))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[tuple[FakeController, Session]]:
    """Rank 1 of 2."""
    place = Place(rank=1, world_size=2, replicas=data_parallel(2))
    with ConfirmingController() as controller:
        made = Session(GaspConfig.resolve(tmp_path), place, FakeSource(), Contact(controller.address, TOKEN))
        try:
            yield controller, made
        finally:
            made.close(goodbye=False)


def test_a_session_registers_when_training_begins(session: tuple[FakeController, Session]) -> None:
    controller, rank = session
    assert rank.started_s == STARTED_S
    rank.training_started(3, 3)
    controller.hear(m.Begin)
    card = controller.hear(m.Register).card
    assert (card.rank, card.pid, card.device) == (1, os.getpid(), "")
    rank.register("too late")
    rank.close()
    controller.hear(m.Goodbye)


def test_what_the_adapter_says_comes_first(session: tuple[FakeController, Session]) -> None:
    controller, rank = session
    rank.register("cuda:0", {"torch": "2.13.0"})
    rank.training_started(0, 0)
    card = controller.hear(m.Register).card
    assert (card.device, card.versions["torch"]) == ("cuda:0", "2.13.0")
    controller.hear(m.Begin)
    rank.close()
    controller.hear(m.Goodbye)
