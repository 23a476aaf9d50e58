"""What goes from one call of a training function to the next one in the same process, and what does not."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from lastgasp.errors import ControlError, UsageError
from lastgasp.gasp.again import Again
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.pytorch import TorchState, rng, train
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.loop import again, again_here, kept_random
from lastgasp.pytorch.loop.again import Entry
from lastgasp.pytorch.loop.again_here import LoopAgain
from lastgasp.pytorch.loop.kept_hooks import KeptHooks, next_hook
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.memory import Held, Memory, bytes_of
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.pytorch.owncopy import fill_in


def test_a_copy_is_equal_and_nobody_elses() -> None:
    net, table = nn.Linear(2, 2), defaultdict(list, {"all": [torch.ones(2)]})
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(net.parameters()), [3, 6])
    before: dict[str, Any] = {
        "model": net.state_dict(), "schedule": schedule.state_dict(), "table": table, "seen": {"a"},
        "pair": (1, {2: 3}),
    }  # fmt: skip
    found = cloned(before)
    assert torch.equal(found["model"].pop("weight"), net.weight)
    assert type(found["model"]) is OrderedDict and vars(found["model"]) == vars(before["model"]) != {}
    assert found["schedule"] == before["schedule"] and found["schedule"]["milestones"] == Counter((3, 6))
    found["table"]["all"][0].zero_()
    found["table"]["new"].append(1)
    found["seen"].add("b")
    assert table["all"][0].tolist() == [1.0, 1.0] and list(table) == ["all"]
    assert (before["seen"], found["pair"]) == ({"a"}, (1, {2: 3})) and "weight" in before["model"]


@pytest.mark.parametrize("kind", [torch.clone, torch.t, lambda one: one[:, ::2], torch.conj, nn.Parameter])
def test_large_copies_are_as_torch_makes_them(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    large = kind(torch.randn(1500, 2000, dtype=torch.complex64))
    found = cloned(large)
    assert type(found) is torch.Tensor and torch.equal(found, large) and not found.requires_grad
    assert found.data_ptr() != large.data_ptr() and found.stride() == large.detach().to("cpu", copy=True).stride()


def test_large_copies_are_in_huge_pages() -> None:
    """Where the kernel has some to give. So large that it is memory that nobody has used: malloc keeps none of that."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel gives no huge pages")
    large = torch.ones(48 << 20, dtype=torch.uint8)
    before, found = _huge_pages(), [cloned(large) for _ in range(4)]
    assert _huge_pages() > before and all(torch.equal(large, one) for one in found)


def _huge_pages() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("AnonHugePages:"))


def test_tensors_in_extra_come_back_to_the_device_that_they_were_on() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    nested = {"rows": [there, 1], "pair": (there, here)}
    item: dict[str, Any] = {"center": there, "own": here, "nested": nested, "old": 1}
    fill_in(item, {"center": here, "own": here, "nested": {"rows": [here, 2, here], "pair": (here, here)}, "new": here})
    assert list(item) == ["center", "own", "nested", "new"]
    rows, pair = item["nested"]["rows"], item["nested"]["pair"]
    found = [item["center"], item["own"], rows[0], rows[2], *pair, item["new"]]
    assert [one.device.type for one in found] == ["meta", "cpu", "meta", "cpu", "meta", "cpu", "cpu"] and rows[1] == 2


def test_kept_objects_enter_the_next_call_without_what_a_broken_step_has_left() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2).eval()
    net = nn.Sequential(first, nn.Dropout(), last)
    last.bias.requires_grad_(False)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TorchState(net, optimizer, scaler=scaler)
    objects = KeptObjects(state, next_hook())
    _broken_off(net, optimizer, scaler)
    objects.renew(state)
    assert [p.grad for p in net.parameters()] == [None] * 4
    assert [m.training for m in net.modules()] == [True, True, True, False]
    assert [p.requires_grad for p in net.parameters()] == [True, True, True, False]
    before = first.bias.detach().clone()
    scaler.scale(first(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)  # takes the gradients for scaled, as they are
    assert torch.allclose(first.bias, before - 0.1)


def _broken_off(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """A step that raises between the scaler and the update, and an evaluation of a model that was made trainable."""
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    hook = optimizer.register_step_pre_hook(_raise)
    with pytest.raises(OSError, match="cut"):
        scaler.step(optimizer)
    hook.remove()
    net.eval()


def _raise(*_: object) -> None:
    raise OSError("cut")


def test_hooks_that_each_call_registers_are_there_once() -> None:
    def registers(net: nn.Linear, optimizer: Any) -> None:
        net.register_forward_hook(lambda *_: None)
        net.weight.register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(lambda *_: None)

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.register_forward_pre_hook(lambda *_: None)
    registers(net, optimizer)  # by the script
    since, made = next_hook(), nn.utils.spectral_norm(nn.Linear(2, 2))  # by the first call, which keeps it
    registers(net, optimizer)
    kept = KeptHooks([net, net.weight, made, optimizer], since)
    for _ in range(2):
        kept.call()
        registers(net, optimizer)
        assert not kept.enter()
        assert (len(net._forward_hooks), len(net._forward_pre_hooks), len(made._forward_pre_hooks)) == (2, 1, 1)
        assert len(optimizer._optimizer_step_pre_hooks) == 2
        net.zero_grad()
        net.weight.sum().backward()  # type: ignore[no-untyped-call]
        assert net.weight.grad is not None and float(net.weight.grad.max()) == 4.0


def test_hooks_of_which_nobody_knows_whether_they_count_twice() -> None:
    net = nn.Linear(2, 2)
    kept = KeptHooks([net], next_hook())
    net.register_forward_hook(lambda *_: None)  # while the loop ran
    kept.call()
    assert kept.enter()
    kept.call()
    for _ in range(2):
        net.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="has 1 hooks of the call before and 2 of this one"):
        kept.enter()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP is in a cycle, and holds the group
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_is_frozen_behind_ddp_is_known_to_the_next_ddp() -> None:
    """It averages what is trained when it is made, and the loop may unfreeze it in a later epoch."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = TorchState(DistributedDataParallel(net))
    net[0].requires_grad_(False)
    kept = KeptObjects(state, next_hook())
    kept.renew(state)
    assert all(p.requires_grad for p in net.parameters())
    kept.enter(TorchState(DistributedDataParallel(net)), _no_note)


@pytest.mark.usefixtures("alone")
def test_a_ddp_that_averages_less_than_in_the_first_call_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    state = TorchState(DistributedDataParallel(net))
    net[1].requires_grad_(False)
    kept = KeptObjects(state, next_hook())
    kept.renew(state)
    with pytest.raises(UsageError, match=r"averages \[2\] gradients, and \[4\] when"):
        kept.enter(TorchState(DistributedDataParallel(net)), _no_note)


def _no_note(text: str) -> None:
    raise AssertionError(text)


def test_no_other_session_takes_what_the_next_call_is_to_begin_with() -> None:
    entry = Entry("", None)
    held = Held(Again(incarnation=1, step=4, source=0, takers=(), lost=(), port=1))
    entry.keep(held)
    with pytest.raises(UsageError, match="open no other session"):
        entry.take()
    entry.again = False
    assert entry.take() is held


def test_a_training_outside_of_the_main_thread_is_not_entered_again(caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []

    def look() -> None:
        entry = again.current()
        assert entry is not None
        found.append(entry.why)

    train(look)
    thread = threading.Thread(target=train, args=(look,))
    thread.start()
    thread.join()
    assert found == ["", "train() is not called on the main thread, where signals arrive"]
    assert found[1] in caplog.text


def test_who_cannot_join_again_saves_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has died: no other rank can join, either."""
    monkeypatch.setattr(again, "cut_connections", lambda *given: 0)
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "LASTGASP_INCARNATION"):
        monkeypatch.setenv(name, "")
    saved = list[BaseException]()

    def lost(held: Held) -> Any:
        raise ControlError("the controller is gone")

    entry = Entry("", None)
    order = Again(incarnation=1, step=4, source=0, takers=(), lost=(), port=1)
    entry.keep(Held(order, rejoin=lost, alone=saved.append))
    with pytest.raises(ControlError, match="is gone") as raised:
        again._enter_again(entry)
    assert saved == [raised.value]


def test_who_waits_in_vain_for_others_joins_again_with_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has made no session yet, and nothing that belongs to the training before is touched once more."""
    monkeypatch.setattr(again, "cut_connections", lambda *given: 0)
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "LASTGASP_INCARNATION"):
        monkeypatch.setenv(name, "")
    joined = list[int]()

    def rejoin(held: Held) -> Any:
        joined.append(held.again.incarnation)
        return SimpleNamespace(session=SimpleNamespace(status=RankStatus()), save_alone=lambda error: None)

    entry, memory = Entry("", None), Memory(4, {}, 0, None)
    orders = [Again(incarnation=n, step=4, source=0, takers=(n,), lost=(n,), port=n, saved=n == 2) for n in (1, 2)]
    entry.keep(Held(orders[0], memory, rejoin=rejoin, state="of the first session"))
    again._enter_again(entry)
    assert again._goes_on(entry, None)
    held = entry.held
    assert held is not None
    life: Any = held.life
    life.before_again(orders[1])
    assert again._goes_on(entry, None) and entry.held is not held
    again._enter_again(entry)
    assert joined == [1, 2] and os.environ["MASTER_PORT"] == "2"
    found = entry.take()
    assert found is not None and found.memory is not None
    assert (found.again, found.memory.step, found.memory.durable, found.life is life) == (orders[1], 4, 4, False)


def test_only_the_first_training_of_a_script_gets_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One would run the script up to its first training, while the other ranks are in a later one."""
    found: list[bool] = []

    def look() -> None:
        entry = again.current()
        assert entry is not None
        found.append(entry.first)

    monkeypatch.setattr(again, "_begun", False)
    train(look)
    train(look)
    monkeypatch.setattr(again, "_begun", False)
    assert again.current() is None  # a session that no train() has called
    train(look)
    assert found == [True, False, False]


@pytest.mark.parametrize("where", ["before the session is closed", "after it", "not at all"])
def test_sigterm_between_two_calls_is_answered_by_the_next_session(where: str) -> None:
    got: list[int] = []
    status = RankStatus()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        between = SigtermBetween(status, lambda number, frame: got.append(number))
        if where == "after it":
            signal.raise_signal(signal.SIGTERM)
        status.asked_to_stop = where == "before the session is closed"
        assert got == []
        between.over()
        assert got == ([] if where == "not at all" else [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("free", "fits"), [(None, True), (799, False), (800, True)])
def test_copies_are_made_only_where_the_host_has_room_for_those_of_all_its_ranks(
    free: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 100 bytes for each of four ranks; a host that does not say has room."""
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    here = LoopAgain.__new__(LoopAgain)
    here._bytes = bytes_of([net], [optimizer]) - 28
    assert here._bytes == 100
    monkeypatch.setattr(again_here, "available", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (here._no_room() == "") == fits


@pytest.mark.parametrize(("every", "step", "saves"), [(4, 8, True), (4, 7, False), (0, 8, False)])
def test_a_periodic_save_that_a_fault_may_have_cut_short_is_made_up(every: int, step: int, saves: bool) -> None:
    asked: list[bool] = []
    here: Any = LoopAgain.__new__(LoopAgain)
    here._held, here._memory = "what is begun with", None
    here.run = SimpleNamespace(
        state=SimpleNamespace(elastic=None), every=every, step=step, want_save=lambda: asked.append(True)
    )
    here.ready()
    assert bool(asked) == saves


def test_an_iterator_that_was_made_outside_cannot_begin_again() -> None:
    entry = Entry("", None)
    outside, data = zip([1], [2], strict=True), [1, 2]
    for one in (outside, outside, iter(data), data):
        entry.takes(one)  # as often as the function likes
    again._goes_on(entry, None)
    again._goes_on(entry, None)  # the second call has not come so far
    entry.takes(data)
    entry.takes(iter(data))
    with pytest.raises(UsageError, match="given a zip that was made before the function was called again"):
        entry.takes(outside)


def test_an_accelerator_that_comes_into_use_in_the_first_call_begins_the_next_one_with_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, stand_in, used = torch.device("cuda", 0), torch.Generator(), list[torch.device]()
    monkeypatch.setattr(kept_random, "_accelerators", lambda: used)
    monkeypatch.setattr(rng, "generator_of", lambda _: stand_in)
    torch.manual_seed(42)
    kept = kept_random.KeptRandom()
    wanted = torch.rand(3)
    used = [device]
    stand_in.manual_seed(7)  # as the function does
    kept.renew()
    assert torch.equal(torch.rand(3, generator=stand_in), wanted)
    assert torch.equal(torch.rand(3), wanted)
