"""Where the real DeepSpeed lies, and how to get it: `python -m support.deepspeed_place` (from `tests/`) builds it.

`make test-full` does so, `make test` does without. It is kept out of site-packages: Lightning, accelerate and
transformers import it where they find it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
VERSION = re.findall(r"^deepspeed==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0]
PACKAGES = ("deepspeed", "hjson", "msgpack", "py-cpuinfo")
"""What else it imports here is in the environment already, ninja apart: nothing is compiled."""
NEEDED = "TESTS_NEED_DEEPSPEED"
"""Set by `make test-full`, which builds it: then a test that would be skipped without DeepSpeed is an error."""


def folder() -> Path:
    """It need not exist."""
    return Path(sys.prefix, f"deepspeed-{VERSION}")


def missing() -> str:
    """What a job with the real DeepSpeed lacks, in words; empty when nothing.

    Raises:
        RuntimeError: it is lacking where `make` has set `NEEDED`.
    """
    if (folder() / "deepspeed" / "__init__.py").exists():
        return ""
    found = f"no deepspeed {VERSION} in {folder()}: cd tests && python -m support.deepspeed_place"
    if os.environ.get(NEEDED):
        raise RuntimeError(f"{NEEDED} is set, and there is {found}")
    return found


def build() -> None:
    """Install it there, unless it is: it comes as a source distribution.

    Raises:
        CalledProcessError: pip failed.
    """
    if (folder() / "deepspeed" / "__init__.py").exists():
        return
    options = ["--quiet", "--no-deps", "--constraint", str(CONSTRAINTS), "--target", str(folder())]
    command = [sys.executable, "-m", "pip", "install", *options, *PACKAGES]
    subprocess.run(command, check=True, timeout=600, env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})


if __name__ == "__main__":
    build()
