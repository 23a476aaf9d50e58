"""Where the real Megatron lies, and how to get it: `python -m support.megatron.place` (from `tests/`) fetches it.

The wheel of megatron-core 0.19.2 holds `megatron.core` and `megatron.training`; it declares Python 3.12 and runs on
3.11 with the shim of `cpu` (facts/megatron.md §7). It is kept out of site-packages, so that a test without it is one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.19.2"
NEEDS = ("torch", "yaml", "psutil", "einops", "numpy", "packaging")
"""Modules that Megatron imports here; the wheel is installed without its dependencies."""


def folder() -> Path:
    """`LASTGASP_MEGATRON`, else a folder of this environment; it need not exist."""
    return Path(os.environ.get("LASTGASP_MEGATRON") or Path(sys.prefix, f"megatron-core-{VERSION}"))


def missing() -> str:
    """What a job with the real Megatron lacks, in words; empty when nothing."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if not (folder() / "megatron" / "training" / "__init__.py").exists():
        return f"megatron-core {VERSION} is not in {folder()}: cd tests && python -m support.megatron.place"
    return ""


def fetch() -> None:
    """Install it there.

    Raises:
        CalledProcessError: pip failed.
    """
    options = ["--quiet", "--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--target", str(folder())]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"megatron-core=={VERSION}"], check=True, timeout=600
    )


if __name__ == "__main__":
    fetch()
