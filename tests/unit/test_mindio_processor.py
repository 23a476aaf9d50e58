"""The drop-in's own decisions in this process, with the engine played: when training begins, with what, who is told."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.adapter import Place, RankStatus, Release, data_parallel
from lastgasp.adapter.again import Again
from lastgasp_mindio import framework, notices, processor, reload, utils
from lastgasp_mindio.elastic import Wishes
from lastgasp_mindio.exchange import NotThere
from lastgasp_mindio.processor import Processor


class Engine:
    """A `training.Protection` that notes what it is told."""

    def __init__(self, attempt: int = 0) -> None:
        self.began: list[int] = []
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.status, self.run = RankStatus(), self
        self.again: Again | None = None
        self.place = Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=attempt)
        self.session: Any = self
        self.closed = 0
        self.errors: list[BaseException] = []
        self.wishes = Wishes()
        self.note = self.notes.append
        self.saver = SimpleNamespace(has=(4,).__contains__)
        self.loaded: list[bool] = []

    def begin(self, step: int, *, loaded: bool) -> None:
        """Training begins."""
        self.began.append(step)
        self.loaded.append(loaded)
        self.status.step = step

    def before_update(self) -> None:
        """As the status."""
        self.status.before_update()

    def step_completed(self, step: int) -> None:
        """As the status."""
        self.steps.append(step)
        self.status.step_completed(step)

    def failed(self, error: BaseException) -> None:
        """Nothing is entered again, unless the test says so."""
        self.errors.append(error)

    def finish(self) -> None:
        """Training ended well."""

    def close(self) -> None:
        """The same."""
        self.closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """What `protect` returns."""
    found = Engine()

    def protect(place: Any, infos: Any, handlers: Any, faults: Any, wishes: Wishes) -> Engine:
        found.wishes = wishes
        return found

    monkeypatch.setattr(processor, "protect", protect)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(reload, "passed_over", lambda *_: "")
    return found


INFO = [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}]


def started() -> Processor:
    """Of rank 0 of one, registered."""
    found = Processor()
    found.init(0, 1)
    found.start()
    found.info = INFO
    return found


def update(found: Processor, step: int) -> None:
    """A pair of calls."""
    found.before_update()
    found.completed(step)


# -- --reuse-fp32-param --------------------------------------------------------------------------------


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's arguments, in a process in which no update was timed yet."""
    args = SimpleNamespace(reuse_fp32_param=True, iteration=100, save="")
    module = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(utils, "_timed", [False, False])
    return args


def train(found: Processor, args: SimpleNamespace, own: int, chained: int, timed: bool) -> int:
    """One iteration of MindSpeed-LLM's; returns its optimizers' own count, which is 0 after loading."""
    for _ in range(chained):
        update(found, max(own, 1))
    found.before_update()
    if timed:
        utils.tft_set_update_start_time()
        utils.tft_set_update_end_time()
    found.completed(args.iteration + 1)
    for _ in range(chained):
        update(found, args.iteration + 1)
    args.iteration += 1
    return int(args.iteration)


@pytest.mark.parametrize(
    ("first", "chained", "timed", "began"),
    [(100, 1, True, 100), (100, 2, True, 100), (0, 2, True, 0), (100, 2, False, 100), (0, 1, False, 1)],
)
def test_a_conversion_of_the_weights_is_no_update(
    first: int, chained: int, timed: bool, began: int, engine: Engine, megatron: SimpleNamespace
) -> None:
    """MindSpeed-LLM calls start and end around them, too, before the first update with a step that was never done."""
    found, own = started(), 0
    megatron.iteration = first
    for _ in range(3):
        own = train(found, megatron, own, chained, timed)
    assert engine.began == [began]
    assert sorted({*engine.steps}) == [*range(engine.steps[0], first + 4)]
    assert engine.status.step == first + 3


def test_in_a_new_process_a_conversion_does_not_go_back_to_step_one(
    engine: Engine, megatron: SimpleNamespace
) -> None:
    """It has got its state from the others, at step 100; its optimizers have counted nothing yet."""
    found = started()
    engine.status.step = 100
    found._count(engine)  # type: ignore[arg-type]
    update(found, 1)
    assert engine.status.step == 100 and not engine.status.inside
    train(found, megatron, 0, 1, True)
    assert engine.status.step == 101


def test_without_it_each_pair_is_an_update(engine: Engine, megatron: SimpleNamespace) -> None:
    megatron.reuse_fp32_param = False
    found = started()
    for step in (7, 8):
        update(found, step)
    assert (engine.began, engine.steps) == ([6], [7, 8])


@pytest.mark.parametrize(("first", "later", "loaded"), [(1, False, True), (5, False, True), (5, True, False),
                                                         (10, False, False)])  # fmt: skip
def test_a_step_that_nobody_can_have_loaded_is_not_called_resumed(
    first: int, later: bool, loaded: bool, engine: Engine
) -> None:
    """There is a checkpoint of step 4; a script may count in tens, or call the training function for each epoch."""
    found = started()
    if later:
        update(found, 1)
        found.close()
    update(found, first)
    assert (engine.began[-1], engine.loaded[-1]) == (first - 1, loaded)


def test_an_end_without_a_start_is_said_once(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    found = started()
    for step in (1, 2, 3):
        update(found, step)
        found.completed(step + 5)
    assert caplog.text.count("without tft_start_updating_os before it") == 1 and engine.steps == [1, 2, 3]


# -- in place ------------------------------------------------------------------------------------------


def again(rung: str) -> Again:
    """What was agreed on."""
    lost, members = ((1,) if rung == "replace" else ()), ((0, 2) if rung == "shrink" else ())
    return Again(incarnation=1, step=3, source=0, takers=lost, lost=lost, port=0, members=members)


def test_the_function_is_entered_again_with_its_own_arguments(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tft_set_step_args is for the handlers; what they put into the function's own list, the function gets."""
    found, entered = started(), []

    def train(*given: str) -> None:
        entered.append(given)
        update(found, len(entered))
        found.handlers.args = "of tft_set_step_args"
        if len(entered) == 1:
            engine.again = again("retry")
            raise RuntimeError("a link")

    monkeypatch.setattr(found, "_enter_again", lambda _: None)
    found.decorate(train)("model", "data")
    assert entered == [("model", "data")] * 2
    assert found.handlers.args == "of tft_set_step_args"


@pytest.mark.parametrize(
    ("rung", "named"), [("retry", "retry"), ("replace", "recover"), ("shrink", "unknow"), (None, "dump")]
)
def test_in_stop_and_clean_the_type_of_the_repair_is_known(
    rung: str | None, named: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindSpeed-LLM's clean handler makes its groups anew for a retry alone."""
    found = started()
    monkeypatch.setattr(framework, "PROCESSOR", found)
    update(found, 1)
    assert framework.tft_get_repair_type() == "unknow"
    engine.status.hold(1.0)
    assert framework.tft_get_repair_type() == "dump"
    more = again(rung) if rung else None
    engine.status.release(Release(recovery=0, ending="in_place", step=3, path="", reason="", again=more))
    assert framework.tft_get_repair_type() == named


# -- what comes inside of the decorated function, or later ---------------------------------------------


@pytest.mark.parametrize("missing", ["start", "replica"])
def test_what_is_missing_at_the_entry_may_come_inside(missing: str, engine: Engine) -> None:
    found = started()
    found.started, found.info, found.retry = missing != "start", None, True
    for name in ("stop", "clean", "repair", "rollback", "rebuild_group"):
        found.handlers.register(name, print, None)

    def main() -> None:
        found.started, found.info = True, INFO
        update(found, 1)
        update(found, 2)

    found.decorate(main)()
    assert (engine.began, engine.steps, engine.closed) == ([0], [1, 2], 1)
    assert engine.wishes.recovery == ("retry" if missing == "replica" else "")  # it would be started twice


def test_updates_before_the_processor_is_started_are_no_reason_to_protect_none(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    found = started()
    found.started = False
    update(found, 1)
    assert "ignored" not in caplog.text
    found.started = True
    update(found, 2)
    assert (engine.began, engine.steps) == ([1], [2])


def test_a_decorated_function_without_an_update_reaches_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation, on rank 0 alone between two epochs, or inside of one, whose training it belongs to."""
    asked: list[str] = []

    def infos(info: Any, place: Any, training: str) -> list[Any]:
        asked.append(training)
        return [info]

    monkeypatch.setattr(processor, "infos_of_all", infos)
    found = started()
    evaluate = found.decorate(lambda: 7)

    def epoch(step: int) -> None:
        update(found, step)
        assert evaluate() == 7
        update(found, step + 1)

    assert evaluate() == 7
    for step in (1, 3):
        found.decorate(epoch)(step)
        assert evaluate() == 7
    assert (engine.began, engine.steps, engine.closed) == ([0, 2], [1, 2, 3, 4], 2)
    assert asked == ["0-1", "0-2"]


def test_where_a_rank_does_not_come_nobody_waits_for_it_again(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: Any) -> list[Any]:
        raise NotThere("rank 1 did not come")

    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(processor, "infos_of_all", wait)
    found = started()
    found.decorate(lambda: update(found, 1))()
    assert "nothing of this job can be saved after a fault: rank 1 did not come" in caplog.text
    monkeypatch.setattr(processor, "infos_of_all", lambda info, *_: [info])
    found.decorate(lambda: update(found, 2))()
    assert engine.began == []


def test_what_is_missing_at_the_first_update_is_said_and_not_waited_for(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """To ask all ranks before each update would cost more than it could bring; the next training asks again."""
    found = started()
    found.info = None
    update(found, 1)
    assert "tft_set_optimizer_replica was not called" in caplog.text
    found.info = INFO
    update(found, 2)
    assert engine.began == []
    found.decorate(lambda: update(found, 3))()
    assert engine.began == [2]


def test_replicas_that_come_after_the_first_update_are_said_to_be_late(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started()
    monkeypatch.setattr(framework, "PROCESSOR", found)
    monkeypatch.setattr(notices, "_said", set())
    framework.tft_set_optimizer_replica(0, INFO)
    assert caplog.text == ""
    update(found, 1)
    framework.tft_set_optimizer_replica(0, INFO)
    assert "tft_set_optimizer_replica came after the first update" in caplog.text


@pytest.mark.parametrize(
    ("name", "given"),
    [("tft_start_updating_os", ()), ("tft_report_error", (8,)), ("tft_wait_next_action", ()),
     ("tft_wait_repair_action", ())],
)  # fmt: skip
def test_what_would_wait_for_the_recovery_is_refused_in_a_handler(
    name: str, given: tuple[int, ...], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery waits for the handler."""
    found = started()
    monkeypatch.setattr(framework, "PROCESSOR", found)
    update(found, 1)
    found.handlers.register("save_ckpt", lambda *_: getattr(framework, name)(*given), None)
    with pytest.raises(RuntimeError, match=f"{name} inside the save_ckpt handler"):
        found.handlers.save(1, [])


def test_the_end_of_the_processor_in_a_handler_is_ignored(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the recovery as well; but what was saved is not to be given up for it."""
    found = started()
    monkeypatch.setattr(framework, "PROCESSOR", found)
    monkeypatch.setattr(notices, "_said", set())
    update(found, 1)
    found.handlers.register("rename", lambda *_: framework.tft_destroy_processor(), None)
    found.handlers.rename(1)
    assert engine.closed == 0 and "inside the rename handler is ignored" in caplog.text
    framework.tft_destroy_processor()
    assert engine.closed == 1


@pytest.mark.parametrize("error", [None, RuntimeError("in the child"), SystemExit(0)])
def test_a_forked_process_says_nothing_of_this_rank(error: BaseException | None, engine: Engine) -> None:
    """A loader's worker, or a child of the script's own, comes out of the training function, too."""
    found, parent, children = started(), os.getpid(), []

    def main() -> None:
        update(found, 1)
        children.append(os.fork())
        if not children[0] and error is not None:
            raise error
        update(found, 2)

    with contextlib.suppress(RuntimeError, SystemExit):
        found.decorate(main)()
    if os.getpid() != parent:
        try:
            found._script_ended()
        finally:
            os._exit(len(engine.errors) + engine.closed + len(engine.steps) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert (engine.closed, engine.steps) == (1, [1, 2])


def test_a_decorated_function_that_was_never_protected_says_so(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    Processor().decorate(lambda: None)()
    assert "training is not protected: tft_init_processor" in caplog.text
