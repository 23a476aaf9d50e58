"""Where the real TensorFlow lies, and how to get it: `python -m support.tf.place` (from `tests/`) makes it.

An environment of its own, of the versions in `requirements.txt`; `make test-full` makes it, `make test` does without.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
VERSION = re.findall(r"^tensorflow_cpu==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE)[0]
NEEDED = "TESTS_NEED_TENSORFLOW"
"""Set by `make test-full`, which makes it: then a test that would be skipped without TensorFlow is an error."""
INSTEAD = "TESTS_TENSORFLOW"
"""An environment made elsewhere."""


def folder() -> Path:
    """The environment's; it need not exist."""
    return Path(os.environ.get(INSTEAD) or Path(sys.prefix, f"tensorflow-{VERSION}"))


def python() -> Path:
    """Its interpreter."""
    return folder() / "bin" / "python"


def missing() -> str:
    """What a job with the real TensorFlow lacks, in words; empty when nothing.

    Raises:
        RuntimeError: something is lacking where `make` has set `NEEDED`.
    """
    if _stamp().exists() or (os.environ.get(INSTEAD) and python().exists()):
        return ""
    found = f"no tensorflow-cpu {VERSION} in {folder()}: cd tests && python -m support.tf.place"
    if os.environ.get(NEEDED):
        raise RuntimeError(f"{NEEDED} is set, and there is {found}")
    return found


def _stamp() -> Path:
    """There when the environment is complete; it holds what it was made from."""
    return folder() / ".complete"


def make() -> None:
    """Make it, unless it is there with these very packages.

    Raises:
        CalledProcessError: pip failed.
    """
    wanted, stamp = REQUIREMENTS.read_text(), _stamp()
    with folder().with_name(f"{folder().name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(folder(), ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder())], check=True, timeout=120)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "-r", str(REQUIREMENTS)]
        subprocess.run([str(python()), "-m", "pip", "install", *options], check=True, timeout=1200)
        stamp.write_text(wanted)


if __name__ == "__main__":
    make()
