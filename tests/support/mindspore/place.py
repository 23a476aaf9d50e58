"""Where the real MindSpore lies, and how to get it: `python -m support.mindspore.place` (from `tests/`) makes it.

Two environments of their own: mindformers pins transformers, datasets, numpy below 2 and its mindspore, none of which
fits the environment of the other tests. `requirements-VERSION.txt` beside this file holds every version of them. The
older one holds what differs, 0.8 GB instead of 1.6 to fetch, and finds the rest in the newer one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MAIN, OLD = "1.9.0", "1.6.0"
"""Versions of mindformers: with mindspore 2.9.0 and 2.7.0 (docs/facts/mindformers.md §0)."""
VERSIONS = (MAIN, OLD)
NEEDED = "TESTS_NEED_MINDSPORE"
"""Set by `make test`, which makes them: then a test that would be skipped without MindSpore is an error."""
INSTEAD = {MAIN: "TESTS_MINDSPORE", OLD: "TESTS_MINDSPORE_OLD"}
"""An environment made elsewhere."""


def folder(version: str = MAIN) -> Path:
    """The environment's; it need not exist."""
    return Path(os.environ.get(INSTEAD[version]) or Path(sys.prefix, f"mindformers-{version}"))


def python(version: str = MAIN) -> Path:
    """Its interpreter; `msrun` starts what is first in PATH under this name."""
    return folder(version) / "bin" / "python"


def missing(version: str = MAIN) -> str:
    """What a job with the real MindSpore lacks, in words; empty when nothing.

    Raises:
        RuntimeError: something is lacking where `make` has set `NEEDED`.
    """
    if _stamp(version).exists() or (os.environ.get(INSTEAD[version]) and python(version).exists()):
        return ""
    found = f"no mindformers {version} in {folder(version)}: cd tests && python -m support.mindspore.place"
    if os.environ.get(NEEDED):
        raise RuntimeError(f"{NEEDED} is set, and there is {found}")
    return found


def requirements(version: str) -> Path:
    """Every package of the environment, each with its version."""
    return HERE / f"requirements-{version}.txt"


def _stamp(version: str) -> Path:
    """There when the environment is complete; it holds what it was made from."""
    return folder(version) / ".complete"


def make(version: str) -> None:
    """Make it, unless it is there with these very packages.

    Raises:
        CalledProcessError: pip failed.
    """
    wanted, stamp = requirements(version).read_text(), _stamp(version)
    folder(version).parent.mkdir(parents=True, exist_ok=True)
    with folder(version).with_name(f"mindformers-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(folder(version), ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder(version))], check=True, timeout=120)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "-r", str(requirements(version))]
        subprocess.run([str(python(version)), "-m", "pip", "install", *options], check=True, timeout=1200)
        if version != MAIN:  # after its own packages, so that only what it lacks is found there
            _packages(version).joinpath("others.pth").write_text(f"{_packages(MAIN)}\n")
        stamp.write_text(wanted)


def _packages(version: str) -> Path:
    """Where its packages lie."""
    return folder(version) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or VERSIONS:
        make(wanted)
