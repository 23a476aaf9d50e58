"""`python -m lastgasp_mindformers.start SCRIPT [ARGS]`: install the hooks, then run the script as if by itself.

What `lastgasp run --framework mindspore` starts in each rank; it needs no `.pth` file.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from lastgasp.errors import ConfigError
from lastgasp_mindformers.installation import install


def main(arguments: Sequence[str]) -> None:
    """Run `SCRIPT [ARGS]` or `-m MODULE [ARGS]`; what it raises goes on.

    Raises:
        ConfigError: there is no script.
    """
    if not arguments or arguments == ["-m"]:
        raise ConfigError("script", None, "SCRIPT [ARGS] or -m MODULE [ARGS]", "Name it.")
    install()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
