"""lastgasp's command line, where each write of an incident's record takes STALL_S seconds."""

from __future__ import annotations

import os
import time

from lastgasp import _fs
from lastgasp.cli import main


def _stall() -> None:
    sync, seconds = _fs.Disk.fsync, float(os.environ["STALL_S"])

    def fsync(disk: _fs.Disk, fd: int) -> None:
        if "/incidents/" in os.readlink(f"/proc/self/fd/{fd}"):
            print("stalled", flush=True)
            time.sleep(seconds)
        sync(disk, fd)

    vars(_fs)["Disk"].fsync = fsync


if __name__ == "__main__":
    _stall()
    main()
