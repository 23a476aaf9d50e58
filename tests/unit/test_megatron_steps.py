"""What counts as a step of Megatron's, with stand-ins for its optimizer and scheduler."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lastgasp_megatron.compose import Composer
from lastgasp_megatron.steps import Built, Steps, wrap
from lastgasp_megatron.topology import Shard


class Inner:
    """As apex's FusedAdam: the step is in the group."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "step": 0}]
        self.state: dict[Any, Any] = {}
        self.fail = False

    def step(self) -> None:
        self.param_groups[0]["step"] += 1
        if self.fail:
            raise RuntimeError("half of it")


class Scaler:
    def __init__(self) -> None:
        self.scale = 8.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}


class Optimizer:
    """As MixedPrecisionOptimizer: an overflow leaves the weights alone and halves the scale."""

    def __init__(self) -> None:
        self.optimizer, self.grad_scaler = Inner(), Scaler()
        self.overflow = False

    def step(self) -> bool:
        if self.overflow:
            self.grad_scaler.scale /= 2
            return False
        self.optimizer.step()
        return True


class Scheduler:
    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "max_lr": 1.0}


class Loop:
    """One rank's training loop: 2 micro-batches of 3 samples on 2 ranks make 12 samples an iteration."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(
            iteration=0, curr_iteration=0, consumed_train_samples=0, skipped_train_samples=0,
            data_parallel_size=2, micro_batch_size=3,
        )  # fmt: skip
        self.optimizer, self.scheduler = Optimizer(), Scheduler()
        self.said: list[str] = []
        self.steps = Steps(
            Built(self.args, [], self.optimizer, self.scheduler),
            capture=lambda step, settled: self.said.append(f"capture {step}{'' if settled else ' before'}"),
            before_update=lambda: self.said.append("updating"),
            step_completed=lambda step: self.said.append(f"end {step}"),
        )  # fmt: skip
        self.steps.install()

    def iteration(self, overflow: bool = False) -> None:
        self.steps.iteration_begin()
        self.optimizer.overflow = overflow
        if self.optimizer.step():
            self.scheduler.num_steps += 12
        self.steps.iteration_end()
        self.args.consumed_train_samples += 12
        self.args.curr_iteration += 1


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    batches = ModuleType("megatron.core.num_microbatches_calculator")
    vars(batches)["get_num_microbatches"] = lambda: 2
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, batches.__name__, batches)
    return Loop()


def test_a_step_is_complete_when_the_inner_step_is_done(loop: Loop) -> None:
    loop.steps.iteration_begin()
    loop.said.clear()
    loop.optimizer.step()
    assert loop.said == ["capture 1 before", "updating", "end 1"]
    boundary = loop.steps.boundary
    assert (boundary.step, boundary.consumed, boundary.adam) == (1, 12, (1,))
    assert boundary.scheduler == {"num_steps": 12, "max_lr": 1.0}, "the scheduler itself steps later"
    assert not loop.steps.inside


def test_the_weights_of_the_model_are_settled_when_the_outer_step_is_done(loop: Loop) -> None:
    seen: list[bool] = []
    loop.steps.on_settled = lambda: seen.append(loop.steps.settled)

    def behind(original: Any, args: Any, kwargs: Any) -> None:
        original()
        seen.append(loop.steps.settled)

    wrap(loop.optimizer.optimizer, "step", behind)
    assert loop.steps.settled and not loop.steps.updated
    loop.iteration()
    assert seen == [False, False], "behind the inner step, and before the copy is done"
    assert loop.steps.settled and loop.steps.updated


def test_a_step_is_logged_behind_its_end(loop: Loop) -> None:
    loop.iteration()
    assert (loop.steps.step, loop.steps.logged) == (1, 0)
    loop.steps.iteration_begin()
    assert loop.steps.logged == 1
    loop.optimizer.step()
    assert (loop.steps.step, loop.steps.logged) == (2, 1), "what raises here leaves no line of step 2"


def test_the_counters_that_follow_are_those_that_were_foretold(loop: Loop) -> None:
    for overflow in (False, True, False):
        loop.iteration(overflow)
        foretold = loop.steps.boundary
        loop.steps.iteration_begin()
        assert loop.steps.boundary == foretold


def test_an_overflow_counts_as_an_iteration_with_its_own_scale(loop: Loop) -> None:
    loop.iteration(overflow=True)
    boundary = loop.steps.boundary
    assert (boundary.step, boundary.adam, boundary.consumed, boundary.scalers) == (1, (0,), 12, ({"scale": 4.0},))
    assert boundary.scheduler == {"num_steps": 0, "max_lr": 1.0}
    assert loop.said[-3:] == ["updating", "capture 1", "end 1"], "it comes to the gate before it counts"


def test_the_scale_of_an_overflow_that_is_under_way_is_not_that_of_the_step_before(loop: Loop) -> None:
    loop.iteration()
    loop.steps.iteration_begin()
    loop.optimizer.overflow = True
    loop.optimizer.step()
    assert loop.steps.boundary.scalers == ({"scale": 8.0},)


def test_the_evaluation_that_follows_a_step_belongs_to_it(loop: Loop) -> None:
    """A resumed job goes on behind it: later evaluations must have the samples that they would have had."""
    vars(loop.args).update(
        do_valid=True, eval_interval=2, eval_iters=3, global_batch_size=4, start_eval_at_iter=None,
        consumed_valid_samples=12,
    )  # fmt: skip
    loop.iteration()
    assert (loop.steps.boundary.validated, loop.steps.cut_short()) == (12, False), "none after step 1"
    loop.iteration()
    loop.args.consumed_valid_samples += 4
    assert (loop.steps.boundary.validated, loop.steps.cut_short()) == (24, True), "one of three batches is done"
    loop.args.consumed_valid_samples += 8
    assert not loop.steps.cut_short()
    loop.steps.iteration_begin()
    assert loop.steps.boundary.validated == 24


def test_what_the_next_line_of_the_log_lacks_is_said(loop: Loop) -> None:
    loop.args.log_interval = 2
    loop.iteration()
    assert loop.steps.logged_late() == (
        "--log-interval 2: the losses in the next line of the log are means of the iterations behind 1 alone"
    )
    loop.iteration()
    assert loop.steps.logged_late() == ""


def test_samples_that_no_rank_gets_are_counted(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = sys.modules["megatron.core.num_microbatches_calculator"]
    for name, size in (("get_current_global_batch_size", 14), ("get_current_running_global_batch_size", 12)):
        monkeypatch.setattr(batches, name, lambda size=size: size, raising=False)
    loop.iteration()
    assert (loop.steps.boundary.consumed, loop.steps.boundary.skipped) == (12, 2)


def test_iterations_that_are_skipped_count(loop: Loop) -> None:
    loop.iteration()
    loop.args.curr_iteration, loop.args.consumed_train_samples = 3, 36
    loop.steps.iteration_begin()
    assert (loop.steps.step, loop.steps.boundary.consumed, loop.said[-1]) == (3, 36, "end 3")
    assert loop.steps.boundary.trained == 12, "the samples of skipped iterations are not computed with"
    loop.iteration()
    assert loop.steps.boundary.trained == 24


def test_operations_are_those_of_the_samples_that_were_trained_with(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = ModuleType("megatron.training.training")
    vars(training)["num_floating_point_operations"] = lambda args, samples: args.each * samples
    for name in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, training)
    loop.args.each, loop.args.num_floating_point_operations_so_far, loop.args.global_batch_size = 5, 1000.0, 99
    shard = Shard(tensor=0, pipeline=0, part=0, parts=1, data_ranks=(0,))
    composer = Composer(Built(loop.args, [], SimpleNamespace(is_stub_optimizer=True), None), shard)
    loop.iteration()
    assert composer.compose(loop.steps.boundary, {})["num_floating_point_operations_so_far"] == 1060.0


def test_an_iteration_without_an_attempt_at_an_update_does_not_count(loop: Loop) -> None:
    loop.steps.iteration_begin()
    loop.steps.iteration_end()
    assert loop.steps.step == 0


def test_an_exception_inside_the_inner_step_leaves_the_state_between_two(loop: Loop) -> None:
    loop.iteration()
    loop.optimizer.optimizer.fail = True
    with pytest.raises(RuntimeError, match="half"):
        loop.iteration()
    assert loop.steps.inside and loop.steps.step == 1


def test_everything_is_put_back(loop: Loop) -> None:
    loop.steps.uninstall()
    assert "step" not in vars(loop.optimizer) and "step" not in vars(loop.optimizer.optimizer)


def test_a_wrapper_below_a_later_one_is_left_in_place() -> None:
    owner = SimpleNamespace(call=lambda: 1)
    undo = wrap(owner, "call", lambda original, args, kwargs: original() + 1)
    later = wrap(owner, "call", lambda original, args, kwargs: original() + 10)
    undo()
    assert owner.call() == 12
    later()
    undo()
    assert owner.call() == 1
