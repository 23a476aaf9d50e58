"""A rank under msrun without MindSpore: `support/launch_worker.py` with msrun's variables, and msrun's scheduler.

Usage: toy_rank.py DIRECTORY MODE [MORE]. `TOY_OPTIONS` holds options of the toy source, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from support import launch_worker
from support.engine_worker import ToySource

PATIENCE = 120.0


def main() -> None:
    """One process that msrun has started."""
    directory = Path(sys.argv[1])
    if os.environ["MS_ROLE"] == "MS_SCHED":
        directory.mkdir(exist_ok=True)
        (directory / f"scheduler-{os.getpid()}").touch()
        deadline = time.monotonic() + PATIENCE
        while not (directory / "scheduler-ends").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    os.environ |= {"RANK": os.environ["RANK_ID"], "WORLD_SIZE": os.environ["MS_WORKER_NUM"]}
    options = json.loads(os.environ.get("TOY_OPTIONS", "{}"))
    vars(launch_worker)["ToySource"] = lambda rank, folder, _: ToySource(rank, folder, options)
    print(f"rank {os.environ['RANK_ID']} runs", flush=True)
    launch_worker.main()


if __name__ == "__main__":
    main()
