"""One protected rank on the drop-in: prints microseconds of a pair of start and end, one sample a line."""

from __future__ import annotations

import os
import sys
import tempfile
import time

from mindio_ttp.framework_ttp import (  # type: ignore[import-not-found, unused-ignore]
    tft_end_updating_os,
    tft_exception_handler,
    tft_init_processor,
    tft_set_optimizer_replica,
    tft_start_processor,
    tft_start_updating_os,
)

CALLS = 10_000


def train(samples: int) -> None:
    """The loop."""
    step = 0
    for _ in range(samples + 1):
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            step += 1
            tft_start_updating_os(-1)
            tft_end_updating_os(step)
        taken = (time.perf_counter_ns() - begun) / CALLS / 1000
        if step > CALLS:  # not the first, which begins the protection
            print(taken)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LASTGASP_DIR"] = folder
        tft_init_processor(0, 1, False, False, "", False)
        tft_start_processor("127.0.0.1", 8000)
        tft_set_optimizer_replica(0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}])
        tft_exception_handler(train)(int(sys.argv[1]))
