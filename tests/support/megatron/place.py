"""Where the real Megatron lies, and how to get it: `python -m support.megatron.place` (from `tests/`) fetches it.

The wheel of megatron-core 0.19.2 holds `megatron.core` and `megatron.training`; it declares Python 3.12 and runs on
3.11 with the shim of `cpu` (megatron.md §7). It is kept out of site-packages, so that a test without it is one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
VERSION = re.findall(r"^megatron-core==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0]
NEEDS = ("torch", "yaml", "psutil", "einops", "numpy", "packaging")
"""Modules that Megatron imports here; the wheel is installed without its dependencies."""
NEEDED = "TESTS_NEED_MEGATRON"
"""Set by `make test`, which fetches it: then a test that would be skipped without Megatron is an error."""


def folder() -> Path:
    """`TESTS_MEGATRON`, else a folder of this environment; it need not exist."""
    return Path(os.environ.get("TESTS_MEGATRON") or Path(sys.prefix, f"megatron-core-{VERSION}"))


def missing() -> str:
    """What a job with the real Megatron lacks, in words; empty when nothing.

    Raises:
        RuntimeError: something is lacking where `make` has set `NEEDED`.
    """
    found = _missing()
    if found and os.environ.get(NEEDED):
        raise RuntimeError(f"{NEEDED} is set, and {found}")
    return found


def _missing() -> str:
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if not _training(folder()).exists():
        return f"megatron-core {VERSION} is not in {folder()}: cd tests && python -m support.megatron.place"
    return ""


def _training(megatron: Path) -> Path:
    return megatron / "megatron" / "training" / "__init__.py"


def fetch() -> None:
    """Install it there, unless it is.

    Raises:
        CalledProcessError: pip failed.
    """
    if _training(folder()).exists():
        return
    options = ["--quiet", "--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--target", str(folder())]
    wheel = f"megatron-core=={VERSION}"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True, timeout=600)


if __name__ == "__main__":
    fetch()
