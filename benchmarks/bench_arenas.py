"""What arenas cost and save: the copy, a step with it, a kill, durable files from it, and a restart that begins there.

Copy, files and restart: one rank alone, 1 GB of shards (`arena_state`). `memcpy` puts the same bytes into memory that
is as warm. Files from an arena against today's gasp, which writes the same from live tensors; both with digests,
manifest and fsync. A restart is what differs between the two, without the start of the processes: verify and fill; and
that together with an arena for the next copy, which the one has, and the other one must make and touch.

The step: two ranks of `fully_shard` whose step takes ten times as long as its copy, in blocks with and without copies
by turns, in the same job. The copy is made between two steps, so with one for each step this cannot be below a tenth;
`arena="auto"` chooses itself every how many steps it copies. What a copy by a thread beside the next step would add is
measured, too; lastgasp does not do that (docs/sharded.md).

The kill: from the signal to the plan by which each shard has a holder, that is, until nothing can be lost any more; the
killed rank's shards are in its arena then.

Where dlrover is installed, its flash checkpoint of the same shards, too (`flash_checkpoint`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.flash_checkpoint import version
from benchmarks.harness import Measure, Options, paired
from lastgasp.events import decode_incident
from lastgasp.testing.faults import ENV_FAULT, ENV_LOG, read_log
from lastgasp.testing.jobs import run_job

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("arena_job.py")
MEGABYTES, ROUNDS, PAIRS, KILLS = 1000.0, 9, 20, 5
WIDTH, MIDDLE, WIDE = 1024, 2048, 3072
"""About 25, 100 and 226 MB of shards on each of two ranks."""
LIMIT = 400.0


def measure(options: Options) -> list[Measure]:
    """All rows."""
    size, rounds, pairs, kills = (4.0, 2, 1, 1) if options.quick else (MEGABYTES, ROUNDS, PAIRS, KILLS)
    widths = (64, 256) if options.quick else (WIDTH, WIDE)
    middle = 64 if options.quick else MIDDLE
    found = _state(options.folder, size, rounds)
    gigabytes = found["nbytes"] / 1e9
    job = _job(options.folder / "cost", middle, pairs)
    added = {way: [with_copy / without - 1 for without, with_copy in job[way]] for way in ("each", "auto", "beside")}
    measures = [
        Measure(name="copy into the arena, with digest", unit="s", samples=found["copy"]),
        Measure(name="memcpy of the same bytes", unit="s", samples=found["memcpy"]),
        paired("copy with digest / memcpy", found, "copy", "memcpy", 1.3),
        Measure(name="GB of the copy in a second", unit="GB/s", samples=[gigabytes / s for s in found["copy"]]),
        Measure(name="gasp from live tensors to durable files", unit="s", samples=found["save live"]),
        Measure(name="gasp from an arena to durable files", unit="s", samples=found["save arena"]),
        Measure(name="torch.distributed.checkpoint.save of the same", unit="s", samples=found["dcp save"]),
        Measure(name="its async_save: until training goes on", unit="s", samples=found["dcp async_save"]),
        paired("from an arena / from live tensors", found, "save arena", "save live", 1.0),
        Measure(name="verify and fill from an arena", unit="s", samples=found["from arena"]),
        Measure(name="verify and fill from files, warm", unit="s", samples=found["from files, warm"]),
        Measure(name="verify and fill from files, cold", unit="s", samples=found["from files, cold"]),
        paired("from an arena / from warm files", found, "from arena", "from files, warm", 0.5),
        paired("the same with an arena for the next copy", found, "ready from arena", "ready from files, warm", 0.5),
        Measure(name="FSDP2 step of ten copies: a copy of each adds", unit="ratio", samples=added["each"]),
        Measure(name="the same with arena='auto': adds", unit="ratio", samples=added["auto"], target=0.02),
        Measure(name="each step by a thread beside the next one, which lastgasp does not do: adds", unit="ratio",
                samples=added["beside"]),
        Measure(name="of how many steps that copies one", unit="steps", samples=[job["every"]]),
    ]
    for width in widths:
        took = [_kill(options.folder / f"kill-{width}-{number}", width) for number in range(kills)]
        measures.append(Measure(name=f"SIGKILL -> all shards held, {_megabytes(width):.0f} MB on each rank",
                                unit="ms", samples=took, target=50.0))  # fmt: skip
    return measures + _flash(found)


def _flash(found: dict[str, Any]) -> list[Measure]:
    name = f"DLRover {version()}, flash checkpoint"
    rows = {f"{name}: into memory, without a digest": "flash checkpoint",
            f"{name}: fill from memory, not verified": "from flash checkpoint"}  # fmt: skip
    return [Measure(name=row, unit="s", samples=found[way]) for row, way in rows.items() if way in found]


def _megabytes(width: int) -> float:
    return 4 * (width * width + width) * 12 / 2 / 1e6


def _state(folder: Path, size: float, rounds: int) -> dict[str, Any]:
    place = folder / "state"
    place.mkdir()
    command = [sys.executable, "-m", "benchmarks.arena_state", "--dir", str(place), "--mb", str(size)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = run_job([*command, "--rounds", str(rounds)], folder / "state.log", timeout=LIMIT, environ=environ)
    return _answer(done.output, "nbytes", done.ok)


def _answer(output: str, key: str, good: bool) -> dict[str, Any]:
    for line in output.splitlines() if good else ():
        if line.startswith("{") and f'"{key}"' in line:
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"the job has not told\n{output[-4000:]}")


def _command(place: Path, width: int, pairs: int) -> list[str]:
    launch = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", "2", "--max-restarts", "0", str(JOB)]
    return [*launch, "--dir", str(place / "ckpts"), "--width", str(width), "--pairs", str(pairs)]


def _job(place: Path, width: int, pairs: int) -> dict[str, Any]:
    place.mkdir()
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_job(_command(place, width, pairs), place / "log", timeout=LIMIT, environ=environ)
    return _answer(done.output, "each", done.ok)


def _kill(place: Path, width: int) -> float:
    """Milliseconds until the plan, of a job whose rank 1 is killed between two steps."""
    place.mkdir()
    log = place / "fault.log"
    environ = os.environ | {"OMP_NUM_THREADS": "1", ENV_LOG: str(log)}
    environ[ENV_FAULT] = "kind=sigkill,rank=1,step=2,phase=backward"
    done = run_job(_command(place, width, 1), place / "log", timeout=LIMIT, environ=environ)
    faults, paths = read_log(log), list((place / "ckpts" / "incidents").glob("*.json"))
    if not faults or not paths:
        raise RuntimeError(f"there was no fault\n{done.output[-4000:]}")
    incident = decode_incident(paths[0].read_bytes())
    if incident.phases.agreed is None or incident.steps_lost:
        raise RuntimeError(f"{incident}\n{done.output[-4000:]}")
    return (incident.phases.agreed - int(str(faults[0]["wall_ns"]))) / 1e6
