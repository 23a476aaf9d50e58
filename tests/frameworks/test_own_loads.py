"""A script that loads checkpoints of its own beside a session: nothing newer is replaced, nothing is mixed unseen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworks.loop_rig import NewProcesses, in_process
from lastgasp.errors import ConfigError
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.own_loads import OwnLoads

WORDS = "were replaced between the resume"


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


class Script:
    """One start of it: what it has loaded itself when it opens its session. SGD counts no steps, the schedule does."""

    def __init__(self, adam: bool = True) -> None:
        torch.manual_seed(1)
        self.net = nn.Linear(2, 2)
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = kind(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.state = TorchState(self.net, self.optimizer, self.schedule)

    def train(self, steps: int) -> Script:
        """Without a session."""
        for _ in range(steps):
            self.net(torch.ones(2)).sum().backward()
            self.optimizer.step()
            self.schedule.step()
        return self

    def saved(self) -> dict[str, Any]:
        """Its own checkpoint."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        """That one."""
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def run(self, directory: Path, last: int, begins: Callable[[], object] = int, **options: Any) -> int:
        """Steps up to `last`; `begins` is called in the block. Returns what the session resumes from."""
        with Session.open(directory, state=self.state, every=1, **options) as session:
            first = session.step
            begins()
            while session.step < last:
                self.train(1)
                session.updated()
        return first


@pytest.mark.parametrize("adam", [True, False], ids=["updates", "epochs"])
def test_a_newer_state_of_the_scripts_own_is_not_replaced(adam: bool, tmp_path: Path) -> None:
    Script(adam).run(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"loaded a newer checkpoint.*resume='never'.*if not s\.resumed") as caught:
        Script(adam).train(4).run(tmp_path, 3)
    assert ("step of optimizer: 4" if adam else "last_epoch of scheduler: 4") in str(caught.value)
    assert not caught.value.restart_helps
    assert Script(adam).train(2).run(tmp_path, 3) == 2  # the same, or an older one
    assert Script(adam).train(9).run(tmp_path, 1, resume="never") == 0


def test_a_restart_goes_on_from_the_sessions_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal would end a job that nobody looks after."""
    Script().run(tmp_path, 2)
    monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
    assert Script().train(4).run(tmp_path, 3) == 2
    assert "has loaded a newer checkpoint of its own before Session.open (step of optimizer: 4)" in caplog.text


def test_a_named_checkpoint_is_loaded_over_anything(tmp_path: Path) -> None:
    Script().run(tmp_path, 2)
    assert Script().train(4).run(tmp_path, 2, resume=tmp_path / "step=00000002.pt") == 2


def test_a_checkpoint_that_the_script_loads_over_a_resume_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Script().train(1).saved()
    Script().run(tmp_path, 2)
    for last, begins, noted in ((3, int, False), (4, None, True), (5, int, False)):
        caplog.clear()
        script = Script()
        assert script.run(tmp_path, last, begins or partial(script.load, own)) == last - 1
        assert (WORDS in caplog.text) == noted, caplog.text


def test_moments_of_another_step_are_noted_where_parameters_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Script().train(1).saved()
    Script().run(tmp_path, 2)
    script = Script()
    script.run(tmp_path, 3, lambda: script.optimizer.load_state_dict(own["optimizer"]))
    assert WORDS in caplog.text


def test_without_a_resume_the_script_may_load_what_it_likes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Script().train(4).saved()
    script = Script()
    assert script.run(tmp_path, 1, lambda: script.load(own)) == 0
    assert WORDS not in caplog.text


def test_a_model_that_was_moved_to_another_device_is_not_compared() -> None:
    script, notes = Script().train(1), list[str]()
    loads = OwnLoads(script.state, notes.append)
    loads.resumed(Path("gasp.pt"))
    script.optimizer.param_groups[0]["params"] = [*script.net.to("meta").parameters()]
    loads.opens()
    assert notes == []
