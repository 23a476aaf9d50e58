"""Real jobs of a loop with `ZeroRedundancyOptimizer`, real faults: a rank's part of the optimizer outlives it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lastgasp.checkpoint import verify
from lastgasp.gasp.attempt import FROM_ARENAS
from lastgasp.pytorch.sharded import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import lean
from support.matrix import LIMIT, STEP, References, check_saved, first_incident, run_case, undisturbed
from support.together import ShardedCase, killed_together

SCRIPT = Path(__file__).parents[1] / "support" / "train_zero.py"
Reference = References[tuple[int, str], Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class ZeroCase(ShardedCase):
    """One job with one fault. `update`: in the rank's own part; `after_update`: before it has sent any parameters."""

    @property
    def exact_step(self) -> int | None:
        """The parameters of an update come from all ranks: who lacks one's goes back to the step before."""
        if self.moment in ("update", "after_update", "step_end", "arena_copy"):
            return STEP if self.kind in ("sigkill", "exception") else None
        return super().exact_step

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final), "--shape", self.shape]
        return [lean.python(), "-m", "lastgasp", "run", "--nproc-per-node", str(self.world), *script]


COVERING = ZeroCase("sigkill", "after_update", "last", "run")
MOMENTS = ("data", "forward", "backward", "update", "after_update", "step_end", "arena_copy", "periodic_save",
           "gasp_save")  # fmt: skip
REST = (
    *(ZeroCase("sigkill", moment, rank, "run") for moment, rank in itertools.product(MOMENTS, ("first", "last"))),
    *(ZeroCase(kind, moment, "last", "run") for kind, moment in itertools.product(
        ("exception", "sigterm"), ("forward", "after_update"))),
    ZeroCase("sigstop", "backward", "last", "run"),
    ZeroCase("killed-together", "data", "all", "run"),
    *(ZeroCase("sigkill", moment, "last", "run", 2, shape)
      for shape in ("bucket", "accumulated") for moment in ("backward", "after_update")),
    *(ZeroCase("sigkill", moment, rank, "run", 4) for moment in ("backward", "update") for rank in ("first", "last")),
    ZeroCase("killed-together", "data", "all", "run", 4),
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights and moments of uninterrupted jobs, by world size and shape."""
    folder = tmp_path_factory.mktemp("reference")
    return References(
        lambda key: undisturbed(ZeroCase("none", "none", "first", "run", *key), folder / "-".join(map(str, key)))
    )


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [COVERING, *(case for case in REST if case != COVERING)], ids=str)
def test_zero(case: ZeroCase, tmp_path: Path, reference: Reference) -> None:
    """No step lost, bit-equal with all moments, everything verified."""
    fired = tmp_path / "fired"
    with killed_together(fired, case.world if case.rank == "all" else 0):
        done = run_case(case, tmp_path, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)})
    assert len(read_log(fired)) >= case.fired, done.output[-4000:]
    assert done.returncode == 0, done.output[-4000:]
    found = first_incident(tmp_path / "ckpts")
    if case.nobody_left:
        assert (found.ending, found.step_saved, found.steps_lost) == ("in_arenas", STEP, 0), done.output[-4000:]
    else:
        check_saved(case, tmp_path / "ckpts", done, LAYOUT, "step=00000004.dcp")
    assert differences(reference[case.world, case.shape], tmp_path / "final.pt") == [], done.output[-4000:]
    if case == COVERING:
        assert FROM_ARENAS.format("0, 1") in found.notes, found.notes


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_when_some_parameters_were_sent(victim: int, tmp_path: Path, reference: Reference) -> None:
    """Each rank has parameters of two steps: all go back to the step before."""
    case = ZeroCase("sigkill", "after_update", ("first", "last")[victim], "run")
    command = [*case.command(tmp_path / "ckpts", tmp_path / "final.pt"), "--between", f"{victim}:{STEP}"]
    done = run_job(command, tmp_path / "log", timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    check_saved(case, tmp_path / "ckpts", done, LAYOUT, "step=00000004.dcp")
    assert differences(reference[2, "plain"], tmp_path / "final.pt") == [], done.output[-4000:]


@pytest.mark.full
def test_without_lastgasp(tmp_path: Path) -> None:
    """What was saved holds what torch's consolidate_state_dict gives, by names: plain optimizers take it."""
    case, own = ZeroCase("none", "none", "first", "run"), tmp_path / "own.pt"
    command = [*case.command(tmp_path / "ckpts", tmp_path / "final.pt"), "--consolidated", str(own)]
    done = run_job(command, tmp_path / "log", timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    newest = tmp_path / "ckpts" / "step=00000012.dcp"
    assert verify(newest, LAYOUT).ok
    dcp_to_torch_save(newest, tmp_path / "one.pt")
    ours, theirs = torch.load(tmp_path / "one.pt"), torch.load(own)
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    consolidated = by_number(ours["optimizer"])
    for number, state in theirs["optimizer"]["state"].items():
        assert state.keys() == consolidated["state"][number].keys()
        assert all(torch.equal(consolidated["state"][number][key], value) for key, value in state.items()), number
    assert consolidated["param_groups"] == theirs["optimizer"]["param_groups"]
    layers = [nn.Linear(8, 32), nn.Linear(32, 33), nn.BatchNorm1d(33), nn.Linear(33, 1)]
    parameters = [p for layer in layers for p in layer.parameters()]
    groups = [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() == 1]}]
    torch.optim.AdamW(groups).load_state_dict(consolidated)


def by_number(optimizer: Any) -> dict[str, Any]:
    """As docs/sharded.md shows it."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: one for name, one in optimizer["state"].items()}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": state, "param_groups": groups}


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_another_number_of_ranks_resumes(before: int, after: int, tmp_path: Path) -> None:
    case = ZeroCase("none", "none", "first", "run", before)
    command = [*case.command(tmp_path / "ckpts", tmp_path / "8.pt"), "--steps", "8"]
    first = run_job(command, tmp_path / "log", timeout=LIMIT)
    assert first.ok, first.output[-4000:]
    more = ZeroCase("none", "none", "first", "run", after)
    second = run_job(more.command(tmp_path / "ckpts", tmp_path / "12.pt"), tmp_path / "log-2", timeout=LIMIT)
    assert second.ok, second.output[-4000:]
    assert "step=00000008.dcp: step 8" in second.output
    assert int(torch.load(tmp_path / "12.pt")["count"]) == 12
