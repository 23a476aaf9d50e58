"""Evaluations whose loaders keep their workers: the start of these draws a random number, which a resume does not."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from torch.utils.data import DataLoader

from frameworks.fit_rig import Job, Small, data, fit, seed, weights

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]


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
