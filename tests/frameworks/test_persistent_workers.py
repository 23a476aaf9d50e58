"""Evaluations whose loaders keep their workers: the start of these draws a random number, which a resume does not."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from frameworks.fit_rig import Boom, Job, Small, data, fit, seed, weights
from lastgasp.fits import FITS
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop import other_workers
from lastgasp_lightning import resume

pytestmark = [pytest.mark.usefixtures("restored_environ", "childrens_signal"), pytest.mark.timeout(300)]


def lasting(size: int) -> DataLoader[Any]:
    return DataLoader(data(2, size), 4, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("sanity", [0, 2])
def test_a_validation_behind_a_resume_draws_what_it_has_drawn_before(sanity: int, tmp_path: Path) -> None:
    ends = []
    for name, strikes in (("straight", [None]), ("faulted", [8, None])):
        job = Job(tmp_path / name, {"max_epochs": 3, "num_sanity_val_steps": sanity})
        for strike in strikes:
            job.restart()
            seed(3)
            model, loader = Small(), DataLoader(data(), 4, shuffle=True)
            assert fit(job.make(strike=strike), model, loader, val_dataloaders=lasting(8)) == (strike is None)
        ends.append(weights(model))
    gc.collect()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


class Had(Callback):
    """Whether a validation loader was there when training went on."""

    def __init__(self) -> None:
        self.found: bool | None = None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Of the first batch."""
        if self.found is None:
            self.found = trainer.val_dataloaders is not None


def test_a_rank_without_its_state_prepares_the_validation_as_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning has collectives there; and in an epoch without a validation it makes no loader by itself."""
    job = Job(tmp_path, {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 2})
    assert not fit(job.make(strike=3), Small(), val_dataloaders=lasting(8))
    monkeypatch.setattr(resume, "own_aux", lambda *_: None)
    job.restart()
    assert fit(job.make(had := Had()), Small(), val_dataloaders=lasting(8))
    assert had.found is True


def validating_loop(folder: Path, strike: int | None, drawn: dict[int, float], anew: str) -> None:
    """It validates behind every second step, with other loaders, too, from the second epoch on."""
    model = nn.Linear(4, 1)
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    validated, late, alike = lasting(16), lasting(20), lasting(20)  # of no other test in this process
    with Session.open(folder, state=state) as s:
        for epoch in s.epochs(3):
            if anew == "epoch":
                validated = lasting(16)
            for number, _ in s.enumerate(DataLoader(data(), 8, num_workers=1)):
                if s.step == strike:
                    raise Boom
                drawn[s.step] = torch.rand(1).item()
                state.optimizers.items["optimizer"].step()
                if number != 1:
                    if anew == "held":
                        validated = lasting(16)
                    list(lasting(16) if anew == "each" else validated)
                    for one in (late, alike) if epoch else ():
                        list(one)


@pytest.mark.parametrize(
    ("strikes", "anew", "told"),
    [
        ((1, 2), "", 1), ((3,), "", 0), ((4,), "", 1), ((5, 8), "", 1),
        ((2, 5, 8), "each", 1), ((3, 7), "each", 0), ((2,), "held", 1), ((3,), "held", 0),
        ((3,), "epoch", 0), ((4,), "epoch", 2), ((6,), "epoch", 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_loop_that_validates_draws_the_same_behind_a_resume(
    strikes: tuple[int, ...], anew: str, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be known is told: whether a loader that was iterated once is one that is made anew, and held."""
    ends = []
    gc.collect()
    for name, parts in (("straight", [None]), ("faulted", [*strikes, None])):
        torch.manual_seed(7)
        drawn: dict[int, float] = {}
        other_workers.resume({})
        for strike in parts:
            FITS._last.clear()
            with pytest.raises(Boom) if strike is not None else contextlib.nullcontext():
                validating_loop(tmp_path / name, strike, drawn, anew)
            gc.collect()
        ends.append(drawn)
    assert caplog.text.count("had been iterated once before") == told
    assert (ends[0] == ends[1]) is not (anew == "held" and told > 0) and len(ends[0]) == 9


class Compared(DataLoader[Any]):
    """A user's: it cannot be a key of a dict."""

    def __eq__(self, other: object) -> bool:
        return self is other


def test_a_loader_that_compares_itself_is_left_alone() -> None:
    other_workers.watch()
    other_workers.given(loader := Compared(data(), 4, num_workers=1, persistent_workers=True))
    assert len(list(loader)) == len(list(loader)) == 6


def test_an_evaluation_of_trainers_behind_a_resume_draws_what_it_has_drawn_before(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    from transformers.trainer_utils import IntervalStrategy

    from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
    from lastgasp.testing.faults import InjectedFault
    from lastgasp_transformers import LastGasp
    from support.train_transformers import Tokens

    ends = []
    changed = {
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "eval_strategy": IntervalStrategy.STEPS,
        "eval_steps": 3,
    }  # fmt: skip
    for name, breaks in (("straight", [None]), ("faulted", [4, None])):
        for after in breaks:
            new_process()
            one = trainer(tmp_path / name, LastGasp(), *([] if after is None else [Breaks(after)]), **changed)
            one.train_dataset = Tokens(12)
            if after is None:
                ends.append(outcome(one, one.train().training_loss))
            else:
                with pytest.raises(InjectedFault):
                    one.train()
    gc.collect()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
