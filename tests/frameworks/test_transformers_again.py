"""Hugging Face's Trainer between two entries of `train`, in one process; and ranks that meet before they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from transformers import Trainer, TrainerCallback

from lastgasp import _clock
from lastgasp.adapter.torch import EnteredFromFiles
from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.gasp import leaving
from lastgasp.gasp.again import INCARNATION
from lastgasp_transformers import LastGasp, again
from lastgasp_transformers.files import read_record
from lastgasp_transformers.script_alone import comes_to_training, run_script_alone
from support.train_transformers import Tokens, arguments, model, result

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]


class Breaks(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """A collective fails in step 6, once."""

    broken = False

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.by_name = {"steps": 0}

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Keep something that is in no checkpoint."""
        self.seen.append(state.global_step)
        self.by_name["steps"] += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Fail, in the mode of an evaluation, with a frozen weight."""
        if state.global_step == 5 and not Breaks.broken:
            Breaks.broken = True
            more["model"].eval().lm_head.weight.requires_grad_(False)
            raise RuntimeError("a collective failed")


def trainer(folder: Path, shape: str, *callbacks: Any) -> Trainer:
    """At most twelve steps."""
    return Trainer(model(), arguments(str(folder), shape), train_dataset=Tokens(24, True), eval_dataset=Tokens(8),
                   callbacks=[*callbacks])  # fmt: skip


@pytest.mark.parametrize("shape", ["plain", "bf16", "noisy"])
def test_train_is_entered_again_inside_of_the_same_call(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "_trained", False)
    monkeypatch.setattr(Breaks, "broken", False)
    entered: list[tuple[Any, ...]] = []

    def goes_on(self: Any, error: BaseException, reset: Any, wrapped: Any) -> bool:
        assert not self._values.cannot()
        self._values.put_back()
        reset()
        bare = one.model_wrapped is one.model and "forward" not in vars(model_)
        entered.append((str(error), one.optimizer, one.lr_scheduler, bare))
        return True

    monkeypatch.setattr(EnteredFromFiles, "goes_on", goes_on)
    plain = trainer(tmp_path / "plain", shape)
    expected = {name: value.clone() for name, value in result(plain, plain.train().training_loss).items()}
    breaks = Breaks()
    one = trainer(tmp_path / "d", shape, breaks, LastGasp(recovery="auto"))
    model_: Any = one.model
    found = result(one, one.train().training_loss)
    assert entered == [("a collective failed", None, None, True)]
    assert model_.lm_head.weight.requires_grad
    # As before train(); nothing here tells the run that it is entered again, so that it takes itself for another job.
    assert breaks.seen == [*range(6, one.state.global_step + 1)] and breaks.by_name == {"steps": len(breaks.seen)}
    embeddings: Any = model_.get_input_embeddings()
    assert not embeddings._forward_hooks and not hasattr(embeddings, "neftune_noise_alpha")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_what_the_script_sets_of_its_own_optimizer_is_known_from_the_first_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has trained by the second one, with another learning rate."""
    monkeypatch.setattr(again, "_trained", False)
    monkeypatch.setattr(Breaks, "broken", False)

    def goes_on(self: Any, error: BaseException, reset: Any, wrapped: Any) -> bool:
        self._values.put_back()
        reset()
        return True

    monkeypatch.setattr(EnteredFromFiles, "goes_on", goes_on)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    one = Trainer(net, arguments(str(tmp_path), "plain"), train_dataset=Tokens(24, True), eval_dataset=Tokens(8),
                  callbacks=[Breaks(), LastGasp(recovery="auto")],
                  optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)))  # fmt: skip
    one.train()
    assert Breaks.broken
    record = read_record(tmp_path / f"checkpoint-{one.state.global_step}")
    assert record is not None and record["as_set"]["lr of optimizer"] == 0.01


def test_only_the_first_training_of_a_script_is_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_trained", False)
    assert again._cannot(before=False) == ""
    assert again._cannot(before=True) == "it is not the first training of its script"


def test_ranks_meet_or_are_told_that_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setenv(INCARNATION, "3")
    entered = EnteredFromFiles()
    store.set("lastgasp/2/here/1", "")  # of an older recovery
    with pytest.raises(DeadlineExceeded, match="to enter the training again"):
        entered.meet(0.05)
    store.set("lastgasp/3/here/1", "")
    entered.meet(5.0)


def test_a_new_process_waits_for_nobody_before_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it take for exchanged what no other rank sends any more. From the training on all is as ever."""
    whole, waited_for = (dist.barrier, distributed_c10d.broadcast), [True]
    monkeypatch.setattr(dist, "all_reduce", dist.all_reduce)
    run_script_alone(lambda: bool(waited_for))
    dist.barrier()  # there is no process group, which a real one would say
    assert dist.barrier(async_op=True).wait()
    by_name, theirs = dist.broadcast, lambda *args: None
    dist.all_reduce = theirs
    with pytest.raises(ControlError, match="broadcast was called before the training"):
        by_name(torch.zeros(1), 0)
    waited_for.clear()
    comes_to_training()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        by_name(torch.zeros(1), 0)  # as ever
    assert dist.all_reduce is theirs
    assert (dist.barrier, distributed_c10d.broadcast) == whole


@pytest.mark.parametrize(("took", "leave", "come"), [(0.5, 5.0, 60.0), (20.0, 20.0, 60.0), (400.0, 40.0, 800.0)])
def test_others_are_waited_for_as_long_as_a_start_takes(
    took: float, leave: float, come: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_took", [])
    assert (leaving.limit(10.0, on_disk=True), EnteredFromFiles().patience) == (5.0, 60.0)
    monkeypatch.setattr(_clock, "process_age", lambda: took)
    leaving.training_begins()
    monkeypatch.setattr(_clock, "process_age", lambda: 1e6)
    leaving.training_begins()
    assert (leaving.limit(10.0, on_disk=True), EnteredFromFiles().patience) == (leave, come)
