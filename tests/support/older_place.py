"""Older releases that an adapter is run with: `python -m support.older_place NAME...` (from `tests/`) fetches them.

Each lies in a folder of its own, which a job has on its PYTHONPATH: all else is the environment's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "lightning": ("lightning==2.5.6", "pytorch-lightning==2.5.6"),
    "transformers": (
        "transformers==5.5.4",
        "huggingface_hub==1.9.0",  # and what else it asks for that is not here, or too new
        "tokenizers==0.22.2",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "h11==0.16.0",
        "anyio==4.16.0",
    ),
}
"""The oldest series that docs/lightning.md and docs/transformers.md name: 2 MB and 15 MB."""
NEEDED = "TESTS_NEED_OLDER"
"""Set by `make test`, which fetches them: then a test that would be skipped without one is an error."""


def version(name: str) -> str:
    """Of the framework itself."""
    return PACKAGES[name][0].partition("==")[2]


def folder(name: str) -> Path:
    """It need not exist."""
    return Path(sys.prefix, f"older-{name}-{version(name)}")


def missing(name: str) -> str:
    """What a job with it lacks, in words; empty when nothing.

    Raises:
        RuntimeError: it is lacking where `make` has set `NEEDED`.
    """
    if folder(name).exists():
        return ""
    found = f"no {name} {version(name)} in {folder(name)}: cd tests && python -m support.older_place {name}"
    if os.environ.get(NEEDED):
        raise RuntimeError(f"{NEEDED} is set, and there is {found}")
    return found


def fetch(name: str) -> None:
    """Install it there, unless it is.

    Raises:
        CalledProcessError: pip failed.
    """
    if folder(name).exists():
        return
    target = folder(name).with_suffix(".part")
    options = ["--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *PACKAGES[name]], check=True, timeout=600)
    target.rename(folder(name))


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        fetch(asked)
