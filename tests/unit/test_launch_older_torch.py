"""torch's agents of earlier releases: each stops the ranks within the time that is given here."""

from __future__ import annotations

import logging
import signal
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lastgasp.launch import torchrun_hook
from lastgasp.launch.agent import GaspAgent
from lastgasp.launch.older_torch import shut_down


class Context:
    """The processes of the ranks, as torch has them."""

    def __init__(self) -> None:
        self.closed: list[tuple[Any, int]] = []

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self.closed.append((death_sig, timeout))


class Newest:  # torch 2.13
    def __init__(self, context: Context | None) -> None:
        self.context, self.rendezvous_closed = context, False

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self.context:
            self.context.close(death_sig, timeout)


class Of211(Newest):
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:  # type: ignore[override]
        if self.context:
            self.context.close(death_sig)


class Of27(Newest):
    def _shutdown(  # type: ignore[override]
        self, death_sig: signal.Signals = signal.SIGTERM, is_restart: bool = False
    ) -> None:
        if self.context:
            self.context.close(death_sig)
        self.rendezvous_closed = not is_restart


@pytest.mark.parametrize("release", [Newest, Of211, Of27])
def test_the_ranks_get_the_time_that_is_given(release: type[Newest]) -> None:
    context = Context()
    agent = release(context)
    for timeout in (77, 3):  # a second call, as torch makes at the end, counts by itself
        shut_down(agent._shutdown, context, signal.SIGINT, timeout, keep=True)
    context.close(None, 9)
    assert context.closed == [(signal.SIGINT, 77), (signal.SIGINT, 3), (None, 9)]
    assert not agent.rendezvous_closed
    shut_down(release(None)._shutdown, None, signal.SIGTERM, 5, keep=False)


def test_where_the_ranks_do_not_use_lastgasp_the_rendezvous_is_closed_as_ever() -> None:
    agent = Of27(Context())
    shut_down(agent._shutdown, agent.context, signal.SIGTERM, 30, keep=False)
    assert agent.rendezvous_closed


@pytest.mark.parametrize("release", [Newest, Of211, Of27])
def test_the_agents_of_known_releases_are_extended(release: type[Newest], monkeypatch: pytest.MonkeyPatch) -> None:
    api = ModuleType("api")
    vars(api)["LocalElasticAgent"] = LocalElasticAgent
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", release._shutdown)
    torchrun_hook.swap_agent(api)
    assert vars(api)["LocalElasticAgent"] is GaspAgent


def test_an_agent_with_other_arguments_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(self: Any, death_sig: signal.Signals = signal.SIGTERM, force: bool = False) -> None: ...

    api = ModuleType("api")
    vars(api)["LocalElasticAgent"] = LocalElasticAgent
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", other)
    with caplog.at_level(logging.WARNING, "lastgasp.launch"):
        torchrun_hook.swap_agent(api)
    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent and "_shutdown takes other arguments" in caplog.text
