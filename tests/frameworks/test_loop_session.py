"""`lastgasp.pytorch.Session` as its users meet it: four lines, its checkpoints, and errors with remedies."""

from __future__ import annotations

import contextlib
import copy
import difflib
import gc
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch import save as torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from frameworks.loop_rig import Container, Counting, Cut, NewProcesses, Parts, Shape, backward, in_process, loader, run
from lastgasp.checkpoint import candidates
from lastgasp.checkpoint.layout import next_path
from lastgasp.errors import CheckpointMismatch, ConfigError, ControlError, NoGoodCheckpoint, NothingLoads, UsageError
from lastgasp.events import decode_incident
from lastgasp.fits import Fits
from lastgasp.pytorch import Session, TorchState, newest_good
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.pytorch.loop.inexact import COUNTED, DREW, EPOCHS, PERSISTENT
from lastgasp.pytorch.loop.optimizer_update import IDLE
from lastgasp.session import Session as Engine
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import taskd_reader
from support.launchers import finish, torchrun

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


def tiny(width: int = 3) -> TorchState:
    """A model and its optimizer."""
    return trained(nn.Linear(4, width))


def trained(model: nn.Module) -> TorchState:
    """And its optimizer."""
    return TorchState(model, SGD(model.parameters(), lr=0.1))


def step(session: Session, state: TorchState) -> None:
    """One update by hand."""
    for optimizer in state.optimizers.values():
        optimizer.step()
    session.updated()


def test_a_learning_rate_that_was_changed_since_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint's counts, as with any `load_state_dict`; also where that one was written by a resumed run."""
    for lr in (0.1, 0.1, 0.01, 0.01):
        caplog.clear()
        model = nn.Linear(4, 3)
        state = TorchState(model, SGD(model.parameters(), lr=lr))
        with Session.open(tmp_path, state=state, every=1) as session:
            step(session, state)
        told = "lr of optimizer is 0.1 (the script: 0.01)" in caplog.text
        assert told == (lr == 0.01 and session.step == 3), caplog.text
    assert next(iter(state.optimizers.values())).param_groups[0]["lr"] == 0.1


def test_a_learning_rate_lasts_where_the_log_says_to_set_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the loop over batches it is the checkpoint's again: the way there repeats what an epoch begins with."""
    used = []
    for lr, most in ((0.1, 3), (0.01, 5)):
        state = TorchState(model := nn.Linear(4, 3), optimizer := SGD(model.parameters(), lr=lr))
        with Session.open(tmp_path, state=state, every=1, max_steps=most) as session:
            optimizer.param_groups[0]["lr"] = lr
            for _ in session.epochs(2):
                for _ in session.batches(range(4)):
                    used.append(optimizer.param_groups[0]["lr"])
                    optimizer.param_groups[0]["lr"] = lr
                    optimizer.step()
    assert used == [0.1, 0.1, 0.1, 0.1, 0.01]
    assert "new values, set them in the body of the loop over batches" in caplog.text


def test_a_restart_on_a_full_disk_resumes_and_saves_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A quota that is full for a while is no reason never to start the job again."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=40", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    try:
        with Session.open(tmp_path / "ck", state=(state := tiny()), every=1, marks=False) as session:
            step(session, state)
        fill = [tmp_path / f"other-{number}" for number in range(40)]
        with contextlib.suppress(OSError):
            for path in fill:
                path.touch()
        with pytest.raises(ConfigError, match="No space left"), Session.open(tmp_path / "ck", state=tiny(), every=1):
            pytest.fail("a first start is refused")
        monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
        with Session.open(tmp_path / "ck", state=(state := tiny()), every=1, marks=False) as session:
            assert session.step == 1
            step(session, state)
            for path in fill:
                path.unlink(missing_ok=True)
            step(session, state)
        assert [one.step for one in candidates([tmp_path / "ck"], LAYOUT)] == [3, 1]
        assert "the checkpoint of step 2 could not be written" in caplog.text
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_another_number_of_ranks_in_the_middle_of_a_pass_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each goes on behind its own batches: some data are left out or trained twice, and the note says how many."""
    data = DataLoader(TensorDataset(torch.arange(20.0)), batch_size=2, shuffle=True)
    state = tiny()
    with Session.open(tmp_path, state=state, every=1, max_steps=3, marks=False) as session:
        for _ in session.batches(data):
            next(iter(state.optimizers.values())).step()
    saved = torch.load(candidates([tmp_path], LAYOUT)[0].path, weights_only=False)
    for ranks, lost in ((1, ""), (3, "6 batches are trained twice. ElasticLoader")):
        saved["lastgasp"]["world_size"] = ranks
        torch.save(saved, tmp_path / "other.pt")
        caplog.clear()
        with Session.open(tmp_path / f"{ranks}", state=tiny(), resume=tmp_path / "other.pt", marks=False) as session:
            for _ in session.batches(data):
                break
        assert ("there were 3 ranks and are 1" in caplog.text) == bool(lost) and lost in caplog.text
        assert "has the data set, its seed" not in caplog.text


def test_another_job_in_the_same_directory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script started twice: both would remove and resume what the other saves."""
    program = "import sys; from pathlib import Path; from lastgasp.adapter.alone import claim\n"
    program += "print(claim(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with Session.open(tmp_path, state=(state := tiny()), every=1) as session:
            step(session, state)
        assert f"another job trains in {tmp_path} at this moment (process {other.pid})" in caplog.text
        other.communicate(timeout=60)
    caplog.clear()
    with Session.open(tmp_path, state=(state := tiny()), every=1) as session:
        step(session, state)
    assert "another job" not in caplog.text


def test_optimizers_that_the_state_lacks_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that replaces the state's makes steps as that one did; one of a forgotten model is a part of the training."""
    known, forgotten, passing = tiny(), nn.Linear(4, 1), nn.Linear(4, 1)
    [model] = known.modules.values()
    plain, momentum = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, momentum=0.9)
    beside = Adam(forgotten.parameters())
    with Session.open(tmp_path, state=known, every=2) as session:
        for number in range(5):
            SGD(passing.parameters()).step()  # as a search for an adversarial example has one
            for one in (model, forgotten):
                backward(one(torch.ones(2, 4)).sum())
            if number == 1:
                assert "TorchState" not in caplog.text
            (plain if number == 0 else momentum).step()
            beside.step()
            assert session.updated() and session.step == number + 1
    assert caplog.text.count("an optimizer (SGD) that is not in TorchState trains its model") == 1
    assert caplog.text.count("an optimizer (Adam) trains parameters that are in no model of TorchState") == 1
    assert [one.step for one in candidates([tmp_path], LAYOUT)] == [4, 2]


class Asked(SGD):
    """Not in the middle of an update."""

    asked, inside = 0, False

    def state_dict(self) -> dict[str, Any]:
        assert not self.inside
        self.asked += 1
        return super().state_dict()


def test_nothing_is_asked_of_a_users_optimizer_in_the_middle_of_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of torchtitan makes an update of its own where one inside has no state yet, or raises: in `backward`."""
    model = nn.Linear(4, 1)
    known, other = Asked(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Session.open(tmp_path, state=TorchState(model, known)) as session:
        for _ in session.batches(range(2)):
            backward(model(torch.ones(2, 4)).sum())
            known.inside = True
            other.step()
            known.inside = False
        assert session.step == 2 and known.asked == 1
    assert caplog.text.count("an optimizer (SGD) that is not in TorchState trains its model") == 1


@pytest.mark.parametrize("held", [True, False])
def test_an_update_that_torch_makes_for_a_state_dictionary_is_none(held: bool, tmp_path: Path) -> None:
    """Without gradients, to have something to load into: at the start, and in the middle for one not used yet."""
    model, late = nn.Linear(4, 1), nn.Linear(4, 1)
    first, second = Adam(model.parameters()), Adam(late.parameters())
    state = TorchState({"model": model, "late": late}, [first, second] if held else first)
    with Session.open(tmp_path, state=state, max_steps=4) as session:
        get_optimizer_state_dict(model, first)
        steps = []
        for number in session.batches(range(9)):
            steps.append(session.step)
            if number == 1:
                get_optimizer_state_dict(late, second)
                continue
            backward(model(torch.ones(2, 4)).sum())
            first.step()
            first.zero_grad()
    assert steps == [0, 1, 1, 2, 3] and second.state


@pytest.mark.parametrize(
    "give",
    [lambda one: one, lambda one: [one], lambda one: {"all": one}, lambda one: one.optimizers],
    ids=["one", "list", "dict", "inside"],
)
def test_optimizers_inside_of_another_one_are_taken_for_it(give: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    container = Container(model)
    state = TorchState(model, give(container))
    assert list(state.optimizers.values()) == container.optimizers
    assert state.containers == ([] if give(container) is container.optimizers else [container])
    container.optimizers.pop()
    assert list(TorchState(model, container).optimizers.values()) == [container]  # it trains something itself


def test_an_optimizer_of_more_than_the_models_is_refused(tmp_path: Path) -> None:
    """Learned weights of losses, which no checkpoint would hold."""
    model, weights = nn.Linear(4, 1), nn.ParameterList([torch.zeros(2)])
    optimizer = SGD([*model.parameters(), *weights], lr=0.1)
    with pytest.raises(ConfigError, match=r"trains 1 tensors that are in no model of TorchState \(of shapes \[2\]\)"):
        Session.open(tmp_path, state=TorchState(model, optimizer))
    Session.open(tmp_path, state=TorchState({"model": model, "weights": weights}, optimizer)).close()


@pytest.mark.parametrize("given", [False, True])
def test_a_loader_that_the_session_does_not_know_is_named(
    given: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that reports its steps, and evaluates on another loader."""
    state = tiny()
    loader, other = (DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2) for _ in range(2))
    with Session.open(tmp_path, state=state) as session:
        waiting = iter(other)
        next(waiting)
        for _ in session.batches(loader) if given else loader:
            step(session, state)
    assert ("come from a DataLoader that is not given to s.batches()" in caplog.text) is not given


def test_loaders_that_the_loop_has_let_go_are_not_kept(tmp_path: Path) -> None:
    """One is made for each epoch: its data, and workers that persist, would stay until the session ends."""
    state, made = tiny(), list[weakref.ref[Any]]()
    with Session.open(tmp_path, state=state) as session:
        for _ in session.epochs(5):
            data = [loader(), loader(generator=torch.Generator())]
            made += map(weakref.ref, data)
            for batches in map(session.batches, data):
                for _ in batches:
                    next(iter(state.optimizers.values())).step()
        gc.collect()
        assert [one() is not None for one in made] == [False] * 8 + [True] * 2


def test_a_group_that_the_script_adds_later_is_refused_with_a_remedy(tmp_path: Path) -> None:
    state = tiny()
    extra = nn.Linear(2, 2)
    with Session.open(tmp_path, state=state, every=1) as session:
        state.optimizers.items["optimizer"].add_param_group({"params": list(extra.parameters())})
        step(session, state)
    with pytest.raises(CheckpointMismatch, match=r"\[2, 2\] .* \[2\] here \(add_param_group must be called before"):
        Session.open(tmp_path, state=tiny())


# -- four lines -----------------------------------------------------------------------------------


def test_a_ddp_script_needs_at_most_five_added_lines() -> None:
    before, after = ((SUPPORT / name).read_text().splitlines() for name in ("loop_before.py", "loop_after.py"))
    old, new = ([line.strip() for line in lines if line.strip()] for lines in (before, after))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    added, removed = ([line for line in changed if line[0] == sign] for sign in "+-")
    assert len(added) <= 5, added
    assert len(removed) == 2, removed  # the heads of the two loops


@pytest.mark.fault
def test_those_lines_change_no_number(tmp_path: Path) -> None:
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    assert finish(torchrun(SUPPORT / "loop_before.py", before), tmp_path).ok
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    cold = ["env", "-C", str(tmp_path), *command, str(SUPPORT / "loop_after.py"), str(after)]
    done = run_job(cold, tmp_path / "log", timeout=250, environ=environ)
    assert done.ok, done.output[-3000:]
    assert differences(before, after) == []


# -- checkpoints ----------------------------------------------------------------------------------------------


def plain(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch)


def adam(p: Parts) -> TorchState:
    return TorchState(p.model, Adam(p.model.parameters()))


def test_every_and_keep(tmp_path: Path) -> None:
    run(Shape(plain, adam), tmp_path, every=4, keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["step=00000008.pt", "step=00000012.pt"]


def test_what_a_killed_commit_has_left_is_verified_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is not in place yet. Nothing of a loop's checkpoint may be unpickled before it has verified."""
    run(Shape(plain, adam), tmp_path, every=4)
    manifest = tmp_path / "step=00000012.pt.manifest.json"
    manifest.rename(next_path(manifest))
    read, real = [], torch.load

    def load(file: Any, **options: Any) -> Any:
        read.append(type(file).__name__)
        return real(file, **options)

    monkeypatch.setattr(torch, "load", load)
    stood = []
    run(Shape(lambda s, p: stood.append(s.step), adam), tmp_path)
    assert (read, stood) == (["VerifiedFile"], [12])


def test_a_damaged_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    run(Shape(plain, adam), tmp_path, every=4)
    newest = tmp_path / "step=00000012.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    seen = []

    def look(s: Session, p: Parts) -> None:
        seen.append((s.step, s.resumed))

    run(Shape(look, adam), tmp_path)
    assert seen == [(8, True)]
    assert list(tmp_path.glob("step=00000012.pt.corrupt*"))


def test_only_bad_ones_refuses(tmp_path: Path) -> None:
    run(Shape(plain, adam), tmp_path, every=12)
    (tmp_path / "step=00000012.pt").write_bytes(b"torn")
    with pytest.raises(NoGoodCheckpoint, match="resume='never'"):
        run(Shape(plain, adam), tmp_path)


def test_the_users_own_files_are_no_candidates(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model_best.pt")
    run(Shape(plain, adam), tmp_path, every=12)
    assert [c.path.name for c in candidates([tmp_path], LAYOUT)] == ["step=00000012.pt"]


def test_a_checkpoint_is_an_ordinary_file_of_torch_save(tmp_path: Path) -> None:
    run(Shape(plain, adam), tmp_path, every=12)
    path = newest_good(tmp_path)
    assert path is not None
    stored = torch.load(path, weights_only=True)
    assert stored["step"] == 12
    Parts(tick=lambda: None).model.load_state_dict(stored["model"])
    assert set(stored) == {"step", "epoch", "model", "optimizer", "scheduler", "scaler", "extra", "flags", "lastgasp"}


def test_max_steps_is_where_a_resumed_run_stops_too(tmp_path: Path) -> None:
    for _ in range(2):
        end, _ = run(Shape(plain, adam), tmp_path, every=1, max_steps=7)
        assert end is not None and end["step"] == 7


def test_every_with_numbers_that_are_no_multiples_of_it(tmp_path: Path) -> None:
    with Session.open(tmp_path, state=(state := tiny()), every=10, keep=9) as session:
        for number in range(3, 40, 4):
            for optimizer in state.optimizers.values():
                optimizer.step()
            session.updated(number)
    assert [one.step for one in candidates([tmp_path], LAYOUT)] == [31, 23, 11]


def test_saves_of_the_scripts_own_in_a_step_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the time of a save, however they are called; those of other threads say nothing about the loop."""
    with Session.open(tmp_path / "ck", state=(state := tiny())) as session:
        phases: list[str] = []
        monkeypatch.setattr(session._run.engine, "progress", phases.append)
        torch_save(state.container.state_dict(), tmp_path / "own.pt")
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "own", no_dist=True)  # type: ignore[attr-defined]
        assert set(phases) == {"save"} and len(phases) >= 2
        del phases[:]
        other = Thread(target=torch.save, args=({}, tmp_path / "other.pt"))
        other.start()
        other.join()
        assert not phases
    torch.save({}, tmp_path / "behind.pt")
    assert not phases


def test_bytes_that_are_written_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is no hang."""
    with Session.open(tmp_path, state=(state := tiny(1_200_000))) as session:
        step(session, state)
        phases: list[str] = []
        monkeypatch.setattr(session._run.engine, "progress", phases.append)
        session.save()
    assert phases.count("save") >= 5  # one for each 4 MB, of 24


@pytest.mark.parametrize("most", [3, 4])
def test_what_the_loop_does_behind_its_last_step_is_done_again(most: int, tmp_path: Path) -> None:
    """`max_steps` in the middle of the second epoch, and at its end; once, also where that epoch asks for no data."""
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    done = []
    for asks in (True, True, False):
        with Session.open(tmp_path, state=(state := tiny()), every=1, max_steps=most) as session:
            for epoch in session.epochs(9):
                for _ in session.batches(loader) if asks else ():
                    step(session, state)
                done.append((epoch, session.step))
    assert done == [(0, 2), *[(1, most)] * 3]


def test_an_update_that_was_torn_is_not_saved(tmp_path: Path) -> None:
    class Torn(SGD):
        """Breaks in the middle of the fourth update."""

        calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            Torn.calls += 1
            self.param_groups[0]["params"][0].add_(1.0)
            if Torn.calls == 4:
                raise Cut
            return super().step(closure)

    def torn(p: Parts) -> TorchState:
        return TorchState(p.model, Torn(p.model.parameters(), lr=0.1))

    assert run(Shape(plain, torn), tmp_path)[0] is None
    assert candidates([tmp_path], LAYOUT) == []


@pytest.mark.parametrize("given", ["compiled", "raw"])
def test_a_compiled_model_stays_in_one_piece(given: str, tmp_path: Path, restored_environ: None) -> None:
    import torch._dynamo

    raw = nn.Linear(4, 1)
    compiled = torch.compile(raw, backend="eager", fullgraph=True)
    optimizer = SGD(raw.parameters(), lr=0.1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    state = TorchState(compiled if given == "compiled" else raw, optimizer)
    with Session.open(tmp_path, state=state, every=1) as s:
        for x in s.batches([torch.randn(6, 4)] * 3):
            optimizer.zero_grad()
            backward(compiled(x).sum())
            optimizer.step()
    assert s.step == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert set(torch.load(tmp_path / "step=00000003.pt")["model"]) == {"weight", "bias"}


def test_each_step_is_marked(tmp_path: Path) -> None:
    def loop(s: Session, p: Parts) -> None:
        plain(s, p)
        p.evaluate()

    run(Shape(loop, adam), tmp_path, every=15, marks=True)
    [folder] = (tmp_path / "profiling").glob("*/0")
    taken = taskd_reader.read(folder)
    assert taken.open == {}
    names = [name for name in taken.names if name.startswith("step ")]
    assert sorted(names, key=lambda name: int(name.split()[1])) == [f"step {n}" for n in range(1, 16)]
    for name in ("dataloader", "forward", "backward", "optimizer"):
        assert taken.names.count(name) == 15, name
    assert taken.names.count("save_checkpoint") == 1


def test_backward_passes_that_raise_leave_no_range_open(tmp_path: Path) -> None:
    """A loop may skip such a batch; at most 64 ranges of one mark can be open."""
    state = tiny()
    with Session.open(tmp_path, state=state) as s:
        for _ in range(70):
            with pytest.raises(RuntimeError):
                backward(torch.zeros(1))
        backward(next(iter(state.models.values()))(torch.ones(1, 4)).sum())
        step(s, state)
        assert s._run.engine.recorder is not None and s._run.engine.recorder.marks.dropped == 0
    [folder] = (tmp_path / "profiling").glob("*/0")
    assert taskd_reader.read(folder).names.count("backward") == 1


# -- several in one script ------------------------------------------------------------------------------------


def folds(directory: Path, ends: list[int]) -> list[int]:
    """A script that trains a model for each fold, up to these steps; where each began."""
    begun = []
    for end in ends:
        state = tiny()
        with Session.open(directory, state=state, every=2, marks=False) as s:
            begun.append(s.step)
            while s.step < end:
                step(s, state)
    return begun


def cut_short(directory: Path, state: TorchState) -> None:
    """One step, and an exception."""
    with Session.open(directory, state=state, marks=False) as s:
        step(s, state)
        raise Cut


class Weighed(TensorDataset):
    """Training changes how much its samples count."""

    rate = 1.0

    def __getitem__(self, index: int) -> Any:
        self.rate = self.rate / 2
        return tuple(tensor[index] for tensor in self.tensors)


class Inside(SGD):
    """As SAM: another optimizer makes its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.base = SGD(self.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_what_training_changes_in_data_and_optimizers_is_named(tmp_path: Path) -> None:
    """No checkpoint holds it."""

    def train(model: nn.Module, state: TorchState, data: Any) -> None:
        with Session.open(tmp_path, state=state) as session:
            for number, [batch] in session.enumerate(data):
                if number == 2:
                    raise Cut
                backward(model(batch).sum())
                step(session, state)

    model = nn.Linear(2, 1)
    with pytest.raises(Cut):
        train(model, TorchState(model, Inside(model.parameters())), DataLoader(Weighed(torch.ones(8, 2)), 2))
    [path] = (tmp_path / "incidents").glob("*.json")
    notes = " ".join(decode_incident(path.read_bytes()).notes)
    assert "training has changed what gives its data: Weighed.rate. No checkpoint holds that" in notes
    assert "optimizers hold what their state_dict lacks: Inside.base" in notes


def test_gradients_that_a_later_step_would_have_used_are_named(tmp_path: Path) -> None:
    """Of an optimizer that is stepped once in two steps: a resumed run begins without them."""

    def train(model: nn.Module, optimizers: list[SGD]) -> None:
        state = TorchState(model, {"seldom": optimizers[0], "always": optimizers[1]})
        with Session.open(tmp_path, state=state, marks=False) as session:
            for number, [batch] in session.enumerate(DataLoader(TensorDataset(torch.ones(8, 2)), 2)):
                backward(model(batch).sum())
                if number == 3:
                    raise Cut
                for optimizer in optimizers if number % 2 else optimizers[1:]:
                    optimizer.step()
                    optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(Cut):
        train(model, [SGD(part.parameters(), lr=0.01) for part in model])
    [path] = (tmp_path / "incidents").glob("*.json")
    notes = decode_incident(path.read_bytes()).notes
    assert any("leaves for an update of a later one" in one and "model.0.weight, model.0.bias" in one for one in notes)


def test_folds_resume_each_from_its_own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch, Fits())
    assert folds(tmp_path, [4, 2]) == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "fit=1-step=00000002.pt", "step=00000002.pt", "step=00000004.pt"
    ]  # fmt: skip
    in_process(monkeypatch, Fits())
    assert folds(tmp_path, [4, 6]) == [4, 2]


def test_a_fold_that_raised_is_not_gone_on_with_by_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_process(monkeypatch, Fits())
    state = tiny()
    with pytest.raises(Cut):
        cut_short(tmp_path, state)
    assert "session 0 of this script" not in caplog.text
    with pytest.raises(Cut):
        cut_short(tmp_path, state)  # the same model once more
    assert (tmp_path / "gasp-step=00000002.pt").exists()
    assert folds(tmp_path, [0]) == [0]
    assert "session 0 of this script" in caplog.text and "resume=<its checkpoint>" in caplog.text


# -- misuse ---------------------------------------------------------------------------------------------------


def test_updated_without_an_update_is_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Session.open(tmp_path, state=tiny(), marks=False) as s:
        assert [s.updated() for _ in range(IDLE - 1)] == [False] * (IDLE - 1)
        assert "no step was complete" not in caplog.text
        assert not s.updated()
        assert "no step was complete" in caplog.text
        assert "call updating() before" in caplog.text
        s.updating()
        assert s.updated()
        assert s.step == 1


def test_a_step_that_goes_backwards(tmp_path: Path) -> None:
    with Session.open(tmp_path, state=tiny(), marks=False) as s:
        s.updating()
        s.updated(5)
        assert s.step == 5
        s.updating()
        with pytest.raises(UsageError, match="goes backwards: step 5"):
            s.updated(5)


def test_two_sessions(tmp_path: Path) -> None:
    with Session.open(tmp_path, state=tiny(), marks=False), pytest.raises(UsageError, match="another session"):
        Session.open(tmp_path, state=tiny(), marks=False)
    Session.open(tmp_path, state=tiny(), marks=False).close()


def test_two_sessions_are_not_tried_again(tmp_path: Path) -> None:
    with Session.open(tmp_path / "a", state=tiny()), pytest.raises(UsageError) as found:
        Session.open(tmp_path / "b", state=tiny())
    assert not found.value.restart_helps and str(tmp_path / "a") in str(found.value)


@pytest.mark.parametrize("kept", [False, True])
def test_a_training_before_this_one_that_no_checkpoint_holds_is_named(
    kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch, Fits())
    for name in ("first", "second"):
        state = tiny()
        with Session.open(tmp_path / name, state=state) as session:
            assert ("is in no checkpoint" in caplog.text) == (name == "second" and not kept)
            step(session, state)
            if kept:
                session.save()


def test_a_closed_session(tmp_path: Path) -> None:
    s = Session.open(tmp_path, state=tiny(), marks=False)
    s.close()
    with pytest.raises(UsageError, match="closed"):
        next(iter(s.batches([1])))


def test_an_update_before_an_inner_loop(tmp_path: Path) -> None:
    state = tiny()
    with Session.open(tmp_path, state=state, marks=False) as s:
        for _ in s.batches([1]):
            state.optimizers.items["optimizer"].step()
            with pytest.raises(UsageError, match="behind the inner"):
                iter(s.batches([3, 4]))


def test_an_inner_loop_in_one_that_cannot_go_back(tmp_path: Path) -> None:
    with Session.open(tmp_path, state=tiny(), marks=False) as s:
        for _ in s.batches(Counting()):
            with pytest.raises(UsageError, match="state of its own"):
                iter(s.batches([3, 4]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tiny(5), r"weight is \[3, 4\] in the checkpoint and \[5, 4\] here"),
        (lambda: TorchState(nn.Linear(4, 3)), "optimizer: the checkpoint has one, this loop has 0"),
        (lambda: trained(nn.Sequential(nn.Linear(4, 3))), "is only in the"),
        (lambda: TorchState((m := nn.Linear(4, 3)), SGD([m.weight])), r"have \[2\] parameters in .* and \[1\] here"),
        (lambda: TorchState((m := nn.Linear(4, 3)), (o := SGD(m.parameters())), StepLR(o, 1)), "scheduler"),
        (lambda: TorchState((m := nn.Linear(4, 3)), SGD(m.parameters()), extra={"best": {}}), r"extra\['best'\]"),
    ],
)
def test_a_state_that_does_not_match_the_checkpoint(make: Any, says: str, tmp_path: Path) -> None:
    state = tiny()
    with Session.open(tmp_path, state=state, marks=False, every=1) as s:
        s.updating()
        s.updated()
    other = make()
    before = [p.clone() for p in other.container.parameters()]
    with pytest.raises(CheckpointMismatch, match=says):
        Session.open(tmp_path, state=other, marks=False)
    assert all(torch.equal(a, b) for a, b in zip(before, other.container.parameters(), strict=True))


def _stepped(folder: Path, state: TorchState, steps: int) -> None:
    with Session.open(folder, state=state, marks=False, every=1) as s:
        for _ in range(steps):
            s.updating()
            s.updated()


def _with_best() -> TorchState:
    """As `tiny`, and something that checkpoints of `tiny` lack."""
    return TorchState((m := nn.Linear(4, 3)), SGD(m.parameters()), extra={"best": {}})


def test_a_checkpoint_that_does_not_fit_is_set_aside_when_an_older_one_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _stepped(tmp_path / "own", _with_best(), 1)
    _stepped(tmp_path / "other", TorchState((m := nn.Linear(4, 3)), SGD(m.parameters())), 2)
    for name in ("step=00000002.pt", "step=00000002.pt.manifest.json"):
        (tmp_path / "other" / name).rename(tmp_path / "own" / name)
    with Session.open(tmp_path / "own", state=_with_best(), marks=False) as s:
        assert (s.step, s.resumed) == (1, True)
    assert (tmp_path / "own/step=00000002.pt.unfit").is_file()
    assert "extra['best']" in (tmp_path / "own/step=00000002.pt.unfit.reason.json").read_text()
    noted = [text for text in caplog.messages if text.startswith("rank 0: ")]  # where a note goes without a controller
    assert len(noted) == 1 and noted[0].endswith("; step 1 was resumed from, and 1 step is trained again")


def test_where_none_fits_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stepped(tmp_path, TorchState((m := nn.Linear(4, 3)), SGD(m.parameters())), 2)
    told: list[BaseException] = []
    monkeypatch.setattr(Engine, "failed_to_start", lambda self, error, kind: told.append(error))
    with pytest.raises(NothingLoads, match=r"step=00000002.pt: rank 0: does not load: CheckpointMismatch") as raised:
        Session.open(tmp_path, state=_with_best(), marks=False)
    assert told == [raised.value], "the incident has its text"
    assert sorted(path.name for path in tmp_path.glob("*.pt*") if ".manifest" not in path.name) == [
        "step=00000001.pt", "step=00000002.pt",
    ]  # fmt: skip


def test_a_foreign_file(tmp_path: Path) -> None:
    torch.save({"model": tiny().container.state_dict()}, tmp_path / "other.pt")
    with pytest.raises(CheckpointMismatch, match="not written by a Session"):
        Session.open(tmp_path / "new", state=tiny(), marks=False, resume=tmp_path / "other.pt")


@pytest.mark.parametrize("data", [loader, Counting, lambda: list(loader())])
def test_a_rank_whose_random_state_was_lost_continues_with_the_right_batch(data: Any, tmp_path: Path) -> None:
    """Ranks that disagreed on the number of batches would wait for each other for ever."""
    numbers: list[int] = []

    def numbered(s: Session, p: Parts) -> None:
        numbers.clear()
        for number, batch in s.enumerate(p.data):
            numbers.append(number)
            p.train(batch)

    assert run(Shape(numbered, adam, data), tmp_path, cut=6)[0] is None
    path = tmp_path / "gasp-step=00000002.pt"
    stored = torch.load(path, weights_only=False)
    stored["lastgasp"]["small"] = {1: stored["lastgasp"]["small"][0]}
    torch.save(stored, tmp_path / "lost.pt")
    run(Shape(numbered, adam, data), tmp_path / "new", resume=tmp_path / "lost.pt")
    assert numbers == [2, 3, 4]


def test_a_loop_that_does_not_report_its_steps_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tiny()
    with Session.open(tmp_path, state=state, marks=False) as s:
        for _ in s.epochs(2):
            for _ in range(60):
                state.optimizers.items["optimizer"].step()
            assert caplog.text.count("50 updates in one step") == 1


def test_a_pass_that_is_cycled_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, other = loader(), loader()
    with Session.open(tmp_path, state=tiny()) as s:
        held = iter(s.batches(data))
        assert len(list(held)) == 5 and "itertools.cycle" not in caplog.text
        for _ in zip(range(7), cycle(s.batches(other)), strict=False):
            pass
        assert caplog.text.count("itertools.cycle repeats the batches of the first pass") == 1


@pytest.mark.parametrize(
    ("by", "passes", "said"),
    [("range", 2, 1), ("range", 1, 0), ("range", 0, 0), ("epochs", 2, 0), ("while", 2, 0)],
)
def test_epochs_of_several_passes_are_named(
    by: str, passes: int, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the loop counts by `s.epoch`, in which each pass counts; not a list that is made for each epoch."""
    loaders: list[Any] = [loader(seed) for seed in range(passes)]
    with Session.open(tmp_path, state=tiny()) as s:
        for _ in range(s.epoch, 2) if by == "range" else s.epochs(2) if by == "epochs" else range(2):
            for one in loaders or [[1, 2]]:
                for _ in zip(s.batches(one), s.batches(range(9)), strict=False):
                    pass
    assert caplog.text.count(EPOCHS) == said


@pytest.mark.parametrize("same", [True, False], ids=["same-object", "new-objects"])
def test_a_resumed_pass_that_is_begun_again_is_named(
    same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Ignite does, which has counted its batches; not what draws from a loader again and again."""

    def train(until: int) -> int:
        with Session.open(tmp_path, state=(state := tiny()), every=3) as s:
            for _ in s.epochs(2):
                data, left = s.batches(listed := loader()), 5  # of which a resumed pass has two
                while left:
                    for _ in data if same else s.batches(listed):
                        if s.step == until:
                            raise Cut
                        state.optimizers.items["optimizer"].step()
                        left -= 1
                        if not left:
                            break
        return s.step

    with pytest.raises(Cut):
        train(3)
    assert train(99) == 3 + 5 + 5 and caplog.text.count(COUNTED) == same


@pytest.mark.parametrize("reports", [True, False])
def test_random_numbers_that_are_drawn_before_a_batch_is_asked_for_are_named(
    reports: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a step ends behind them, a resumed run takes batches of other loaders."""

    def train(folder: Path, until: int) -> list[int]:
        random.seed(3)
        taken = []
        with Session.open(folder, state=(state := tiny()), every=3) as s:
            for _ in s.epochs(1):
                held = [iter(s.batches(loader(seed))) for seed in range(2)]
                while held:
                    which = random.choice(range(len(held)))
                    if next(held[which], None) is None:
                        del held[which]
                        continue
                    if s.step == until:
                        raise Cut
                    state.optimizers.items["optimizer"].step()
                    taken.append(which)
                    if reports:
                        s.updated()
        return taken

    whole = train(tmp_path / "whole", 99)
    with pytest.raises(Cut):
        train(tmp_path / "cut", 3)
    assert DREW not in caplog.text
    rest = train(tmp_path / "cut", 99)
    assert (rest == whole[3:]) is reports and caplog.text.count(DREW) == (not reports)


def test_workers_that_persist_begin_later_in_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, childrens_signal: None
) -> None:
    found = []
    for _ in range(2):
        with Session.open(tmp_path, state=(state := tiny()), every=2) as s:
            data = loader(num_workers=1, persistent_workers=True)
            for _ in s.epochs(1):
                for number, _ in s.enumerate(data):
                    state.optimizers.items["optimizer"].step()
                    if number == 1:
                        break
        found.append((s.step, caplog.text.count(PERSISTENT)))
        del data
    assert found == [(2, 0), (2, 1)]


def test_a_model_that_is_saved_as_a_whole_can_be_loaded_by_weights_only(tmp_path: Path) -> None:
    """As pytorch/examples' word_language_model does; the hooks go on afterwards, those of the user, too."""
    model = next(iter((state := tiny()).models.values()))
    with Session.open(tmp_path, state=state) as session:
        model.register_forward_hook(_counted)
        before = {name: list(getattr(model, name)) for name in vars(model) if "_hooks" in name}
        torch.save(model, tmp_path / "whole.pt")
        assert {name: list(getattr(model, name)) for name in vars(model) if "_hooks" in name} == before
        with torch.serialization.safe_globals([nn.Linear, _counted]):
            loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
        step(session, state)
    assert list(loaded._forward_hooks.values()) == [_counted] and not loaded._forward_pre_hooks


def _counted(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook of the user's."""


def test_the_model_can_be_pickled_and_copied_meanwhile(tmp_path: Path) -> None:
    """As with `torch.save(model)`; what is loaded elsewhere needs no lastgasp."""
    model, x = nn.Linear(4, 3), torch.ones(1, 4)
    state = trained(model)
    with Session.open(tmp_path / "ckpts", state=state) as session:
        torch.save(model, tmp_path / "model.pt")
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
        session.updated(step=1)
    assert pickle.loads(pickle.dumps(twin)) is not None, "behind the session, too"
    asked = f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 4)).sum().item()"
    code = f"import sys, torch; print({asked}, 'lastgasp' in sys.modules)"
    done = run_job([sys.executable, "-c", code], tmp_path / "log", timeout=60.0)
    assert done.output.split() == [str(twin(x).sum().item()), "False"], done.output


def test_a_loader_in_use_can_be_copied(tmp_path: Path) -> None:
    data = loader()
    with Session.open(tmp_path, state=tiny()) as s:
        for _ in s.batches(data):
            for copied in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
                assert len(list(copied)) == 5
            assert type(copied.batch_sampler) is BatchSampler
            assert type(copy.copy(data.batch_sampler)) is BatchSampler


class FullyShardedDataParallel(nn.Linear):
    """Of another package (fairscale), named as torch names its own."""


@pytest.mark.parametrize("model", [FullyShardedDataParallel(2, 2), nn.Sequential(FullyShardedDataParallel(2, 2))])
def test_sharded_models_are_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each rank holds completely"):
        Session.open(tmp_path, state=TorchState(model), marks=False)


def test_several_processes_need_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        Session.open(tmp_path, state=tiny(), marks=False)


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evry"):
        Session.open(tmp_path, state=tiny(), evry=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="every"):
        Session.open(tmp_path, state=tiny(), every=-1)
    with pytest.raises(ConfigError, match="TorchState"):
        Session.open(tmp_path, state=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="named_parameters"):
        TorchState(3)
    with pytest.raises(ConfigError, match="kept in a dict"):
        TorchState(nn.Linear(1, 1), extra={"best": 0.0})
    with pytest.raises(ConfigError, match="belongs into model"):
        TorchState(nn.Linear(1, 1), extra={"ema": nn.Linear(1, 1)})


@pytest.mark.parametrize("bad", [Lock(), defaultdict(lambda: 0)], ids=["copy", "pickle"])
def test_extra_that_no_file_can_hold_is_refused(bad: Any, tmp_path: Path) -> None:
    state = TorchState(model := nn.Linear(1, 1), SGD(model.parameters()), extra={"mine": {"bad": bad}})
    with pytest.raises(ConfigError, match=r"extra\['mine'\]"):
        Session.open(tmp_path, state=state)


@pytest.mark.parametrize("bad", [Lock(), defaultdict(lambda: 0)], ids=["copy", "pickle"])
def test_what_cannot_be_saved_of_extra_costs_no_step(
    bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor of a graph is saved without it; any other thing keeps that item as it was before."""
    mine: dict[str, Any] = {"at": 0}
    state = TorchState(model := nn.Linear(1, 1), SGD(model.parameters()), extra={"mine": mine})
    with Session.open(tmp_path, state=state, every=1) as session:
        mine |= {"at": 1, "hidden": model(torch.ones(1))}
        step(session, state)
        assert "cannot be saved" not in caplog.text
        mine |= {"at": 2, "bad": bad}
        step(session, state)
        step(session, state)
    assert caplog.text.count("extra['mine'] cannot be saved") >= 1
    stored = torch.load(tmp_path / "step=00000003.pt", weights_only=False)
    assert stored["extra"]["mine"]["at"] == 1 and not stored["extra"]["mine"]["hidden"].requires_grad
    assert any("extra['mine'] cannot be saved" in note for note in stored["lastgasp"]["notes"])


@pytest.mark.parametrize(("bad", "kept"), [(defaultdict(lambda: 0), 1), (Lock(), 3)], ids=["pickle", "copy"])
def test_what_no_file_could_hold_since_the_last_save_is_saved_as_it_was_then(
    bad: Any, kept: int, tmp_path: Path
) -> None:
    """A periodic save, and one behind an exception, between which nothing is tried; neither ends anything."""
    mine: dict[str, Any] = {"at": 0}
    state = TorchState(model := nn.Linear(1, 1), SGD(model.parameters()), extra={"mine": mine})

    def train() -> None:
        with Session.open(tmp_path, state=state, every=3) as session:
            for at in range(1, 6):
                mine["at"] = at
                if at == kept + 1:
                    mine["bad"] = bad
                step(session, state)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train()
    for name, reached in (("step=00000003.pt", 3), ("gasp-step=00000005.pt", 5)):
        stored = torch.load(tmp_path / name, weights_only=False)
        assert (stored["step"], stored["extra"]) == (reached, {"mine": {"at": kept}})
        noted = any("extra['mine'] cannot be saved" in note for note in stored["lastgasp"]["notes"])
        assert noted == (kept != reached)


def test_the_public_module_loads_torch_only_when_asked() -> None:
    code = "import sys, lastgasp.pytorch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_hooks_are_gone_after_the_session(tmp_path: Path) -> None:
    state, backward = tiny(), torch.autograd.backward
    model, optimizer = state.models.items["model"], state.optimizers.items["optimizer"]
    data = loader()
    with Session.open(tmp_path, state=state, marks=False) as s:
        assert torch.autograd.backward is not backward
        for _ in s.batches(data):
            step(s, state)
    assert torch.autograd.backward is backward
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert type(data.batch_sampler).__name__ == "BatchSampler"


def test_a_stream_that_got_shorter_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be skipped any more; the loop goes on with what there is, and nobody has to guess why."""

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __init__(self, length: int) -> None:
            self.length = length

        def __iter__(self) -> Any:
            return (torch.full((4,), index / 8.0) for index in range(self.length))

    def train(length: int, until: int) -> None:
        state = tiny()
        [model] = state.models.values()
        with Session.open(tmp_path, state=state, every=2) as session:
            for _ in session.epochs(1):
                for batch in session.batches(torch.utils.data.DataLoader(Stream(length), batch_size=1)):
                    backward(model(batch).sum())
                    step(session, state)
                    if session.step == until:
                        return

    train(8, until=6)
    train(3, until=100)
    assert "the data are shorter than before: 6 batches were trained on" in caplog.text


def test_ranks_that_do_not_come_together_cost_a_checkpoint_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One evaluates for longer than the others wait for it."""
    real = Engine.gather

    def gather(self: Engine, tag: str, payload: bytes, seconds: float = 300.0) -> list[bytes]:
        if tag == "loop/save/2":
            raise ControlError("ranks [1] did not arrive within 600 s")
        return real(self, tag, payload)

    monkeypatch.setattr(Engine, "gather", gather)
    with Session.open(tmp_path, state=(state := tiny()), every=2) as session:
        for _ in range(4):
            step(session, state)
    assert "no checkpoint of this step (ranks [1] did not arrive" in caplog.text
    assert [one.step for one in candidates([tmp_path], LAYOUT)] == [4]


class Masked(nn.Linear):
    """Makes a buffer in its first forward pass, and a longer one later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (mask := self._buffers.get("mask")) is None or len(mask) < len(x):
            self.register_buffer("mask", mask := torch.ones(len(x)), persistent=False)
        return super().forward(x) * mask[: len(x), None]


@pytest.mark.parametrize("made", [False, True])
def test_a_buffer_that_is_made_before_training_is_the_scripts_own(made: bool, tmp_path: Path) -> None:
    """An evaluation before the first step of a resumed run has made it, or a longer one than there was."""
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    for most, evaluated in ((2, 3), (4, 5)):
        model = Masked(4, 1)
        with torch.no_grad():
            model(torch.ones(int(made), 4))
        state = trained(model)
        with Session.open(tmp_path, state=state, every=1, max_steps=most) as session:
            with torch.no_grad():
                model(torch.ones(evaluated, 4))
            for _ in session.epochs(9):
                for [batch] in session.batches(data):
                    backward(model(batch).sum())
                    step(session, state)
    assert session.step == 4


@pytest.mark.parametrize("how", ["by hand", "told", "accumulated", "weights swapped", "diverged"])
def test_parameters_that_change_without_an_update_are_noted(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by the replay of a CUDA graph, which calls nothing in Python and counts in no `_version`."""
    state = tiny()
    with Session.open(tmp_path, state=state) as session:
        for number, x in enumerate(session.batches(torch.randn(260, 2, 4))):
            [model], [optimizer] = state.models.values(), state.optimizers.values()
            if how == "told":
                session.updating()
            if how in ("by hand", "told") or number == 150:
                for parameter in model.parameters():
                    parameter.data.mul_(0.99)
            if how == "diverged" and not number:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            if how == "accumulated":
                backward(model(x).sum())
                if number == 230:
                    optimizer.step()
    assert session.step == {"told": 260, "accumulated": 1}.get(how, 0)
    assert caplog.text.count("a CUDA graph of the whole step") == (how == "by hand")


def test_a_compiled_update_has_the_hooks_before_and_behind_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Traced, what is done before the update could come behind it: parameters then seemed to change before it."""
    state = tiny()
    [model], [optimizer] = state.models.values(), state.optimizers.values()
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    with Session.open(tmp_path, state=state) as session:
        for x in session.batches(torch.randn(4, 2, 4)):
            optimizer.zero_grad()
            backward(model(x).sum())
            update()
    torch.compiler.reset()
    assert session.step == 4 and "parameters change before the update" not in caplog.text
