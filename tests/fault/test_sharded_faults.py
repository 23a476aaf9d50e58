"""Real jobs of a loop with `fully_shard`, real faults: a shard that one rank held is not lost with it."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from lastgasp.checkpoint import verify
from lastgasp.gasp.attempt import FROM_ARENAS
from lastgasp.pytorch.sharded import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import lean
from support.launchers import incidents, running
from support.matrix import LIMIT, STEP, References, check_saved, first_incident, run_case, undisturbed
from support.together import ShardedCase, killed_together, open_arenas
from support.train_sharded import FLAT, SHAPES
from support.waiting import until

SCRIPT = Path(__file__).parents[1] / "support" / "train_sharded.py"
Reference = References[tuple[int, str], Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class LoopCase(ShardedCase):
    """One job with one fault."""

    @property
    def exact_step(self) -> int | None:
        """A killed rank's shard is that of the last boundary; what the others did beyond it nobody could train on.

        Its live replica, where it has one, has completed the step.
        """
        if "hybrid" in self.shape:
            return None if self.moment == "arena_copy" or self.collective else super().exact_step
        if self.moment in ("update", "after_update", "arena_copy"):
            return STEP if self.kind == "sigkill" else None
        return None if self.collective and self.kind != "sigkill" else super().exact_step

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final), "--shape", self.shape]
        return [lean.python(), "-m", "lastgasp", "run", "--nproc-per-node", str(self.world), *script]


COVERING = (
    LoopCase("sigkill", "arena_copy", "last", "run"),
    LoopCase("sigkill", "gasp_save", "first", "run", 2, "flat-own"),
    LoopCase("killed-together", "arena_copy", "all", "run"),
)
COLLECTIVES = ("all_gather-2", "all_gather-6", "reduce_scatter-1", "reduce_scatter-4")
"""All-gathers of the forward and of the backward pass, the first and the last reduce-scatter."""
MOMENTS = ("data", "forward", "backward", "update", "after_update", "arena_copy", "periodic_save", "gasp_save")
REST = (
    *(LoopCase("sigkill", moment, rank, "run", world, shape)
      for shape, world, moment in itertools.product(SHAPES, (2, 4), MOMENTS + COLLECTIVES)
      for rank in (("first", "last") if world == 2 else ("first", "1", "2", "last"))
      if (shape, world) != ("hybrid", 2)),
    *(LoopCase("sigkill", moment, rank, "run", 4 if shape == "flat-hybrid" else 2, shape)
      for shape, moment, rank in itertools.product(FLAT, MOMENTS + COLLECTIVES, ("first", "last"))),
    *(LoopCase("killed-together", "data", "all", "run", 2, shape) for shape in FLAT if shape != "flat-hybrid"),
    *(LoopCase(kind, "forward", "last", "run", 2, "flat-own") for kind in ("exception", "sigterm", "sigstop")),
    *(LoopCase("killed-together", "data", "all", "run", 4, shape) for shape in ("plain", "hybrid")),
    *(LoopCase(kind, moment, "last", "run") for kind, moment in itertools.product(
        ("exception", "sigterm", "sigstop"), ("forward", "after_update", "periodic_save", *COLLECTIVES[1::2]))
      if (kind, moment) != ("exception", "periodic_save")),  # the job trains on without that checkpoint
    LoopCase("sigkill", "data", "two", "run", 4),
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights of uninterrupted jobs, by world size and shape."""
    folder = tmp_path_factory.mktemp("reference")
    return References(
        lambda key: undisturbed(LoopCase("none", "none", "first", "run", *key), folder / "-".join(map(str, key)))
    )


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_sharded_covering(case: LoopCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in COVERING], ids=str)
def test_sharded_rest_of_the_matrix(case: LoopCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


def processes() -> list[int]:
    """All of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def test_ranks_and_launcher_are_killed_and_nothing_is_left(tmp_path: Path, reference: Reference) -> None:
    """Arenas go with the last process that has them; the next start begins with the newest file, and cleans up."""
    case, fired, arenas = LoopCase("killed-together", "data", "all", "run"), tmp_path / "fired", set[int]()
    folders = {"LASTGASP_RING_DIR": str(tmp_path / "ring"), "LASTGASP_RUNTIME_DIR": str(tmp_path / "run")}
    for folder in folders.values():
        Path(folder).mkdir(mode=0o700)
    with killed_together(fired, case.world, arenas):
        first = run_case(case, tmp_path, folders | case.environment(fired))
    assert first.returncode == -signal.SIGKILL, first.output[-4000:]
    assert len(arenas) == case.world
    until(lambda: not any(arenas & open_arenas(pid) for pid in processes()), "the memory of the arenas is free")
    second = run_case(case, tmp_path, folders)
    assert second.ok, second.output[-4000:]
    assert "step=00000004.dcp: step 4" in second.output and "was killed: nothing is taken over" in second.output
    assert differences(reference[case.world, case.shape], tmp_path / "final.pt") == [], second.output[-4000:]
    assert [list(Path(folder).iterdir()) for folder in folders.values()] == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sigterm", "exception"])
def test_without_a_launcher_all_ranks_save_what_they_hold(kind: str, tmp_path: Path, reference: Reference) -> None:
    """The fault is one rank's, of which no controller tells the others; then the job is started again. Before it a
    periodic checkpoint is due."""
    case, directory, fired = LoopCase("none", "none", "all", "run"), tmp_path / "ckpts", tmp_path / "fired"
    fault = f"kind=sleep:8,rank=0,step=5,phase=data;kind={kind},rank=1,step=9,phase=forward"
    command = case.command(directory, tmp_path / "final.pt")
    with running(tmp_path, command, LASTGASP_FAULT=fault, LASTGASP_FAULT_LOG=str(fired)) as [job]:
        until(lambda: bool(read_log(fired)), "rank 0 pauses")
        job.process.kill()
        job.code()
        until(lambda: len(incidents(directory)) == case.world, "both ranks have written their incidents")
    assert {(one.ending, one.steps_lost) for one in incidents(directory)} == {("saved", 0)}, job.output[-6000:]
    assert verify(directory / "step=00000008.dcp", LAYOUT).ok, job.output[-6000:]
    again = run_case(case, tmp_path, {})
    assert again.ok and "resumed from" in again.output and "gasp-step=" in again.output, again.output[-4000:]
    assert differences(reference[case.world, case.shape], tmp_path / "final.pt") == [], again.output[-4000:]


def check(case: LoopCase, folder: Path, reference: Reference) -> None:
    """One case: no step lost, bit-equal, everything verified."""
    fired = folder / "fired"
    with killed_together(fired, case.world if case.rank == "all" else 0):
        done = run_case(case, folder, case.environment(fired))
    assert len(read_log(fired)) >= case.fired, done.output[-4000:]
    assert done.returncode == 0, done.output[-4000:]
    if case.nobody_left:
        found = first_incident(folder / "ckpts")
        assert (found.ending, found.step_saved, found.steps_lost) == ("in_arenas", STEP, 0), done.output[-4000:]
        assert not list((folder / "ckpts").glob("gasp-*")), done.output[-4000:]
    else:
        check_saved(case, folder / "ckpts", done, LAYOUT, "step=00000004.dcp")
    assert differences(reference[case.world, case.shape], folder / "final.pt") == [], done.output[-4000:]
    if case == COVERING[0]:
        noted = first_incident(folder / "ckpts").notes  # the survivor may still hold that step itself
        assert {FROM_ARENAS.format("0, 1"), FROM_ARENAS.format("1")} & set(noted), noted


def test_plain_torch_reads_the_directory(reference: Reference) -> None:
    """Without lastgasp, without process groups, by an unsharded model of the same names."""
    final = reference[2, "plain"]
    newest = final.parent / "ckpts" / "step=00000012.dcp"
    assert verify(newest, LAYOUT).ok
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 33), nn.LayerNorm(33), nn.Linear(33, 1)
    )
    state = {"model": model.state_dict()}
    load(state, storage_reader=FileSystemReader(newest), no_dist=True)
    wanted = torch.load(final)
    assert all(torch.equal(value, wanted[name]) for name, value in state["model"].items())


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (2, 4)])
def test_another_number_of_ranks_resumes(tmp_path: Path, before: int, after: int) -> None:
    case = LoopCase("none", "none", "first", "run", before)
    first = run_job(
        [*case.command(tmp_path / "ckpts", tmp_path / "8.pt"), "--steps", "8"], tmp_path / "log", timeout=LIMIT
    )
    assert first.ok, first.output[-4000:]
    more = LoopCase("none", "none", "first", "run", after)
    second = run_job(more.command(tmp_path / "ckpts", tmp_path / "12.pt"), tmp_path / "log-2", timeout=LIMIT)
    assert second.ok, second.output[-4000:]
    assert "step=00000008.dcp: step 8" in second.output
    assert int(torch.load(tmp_path / "12.pt")["count"]) == 12
