"""`python -m lastgasp_mindformers.start SCRIPT [ARGS]`: install the hooks, then run the script as if directly.

What `lastgasp run --framework mindspore` starts in each rank; it needs no `.pth` file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lastgasp.adapter import run_script
from lastgasp_mindformers.installation import install


def main(arguments: Sequence[str]) -> None:
    """Run `SCRIPT [ARGS]` or `-m MODULE [ARGS]`; what it raises propagates.

    Raises:
        ConfigError: there is no script.
    """
    run_script(arguments, install)


if __name__ == "__main__":
    main(sys.argv[1:])
