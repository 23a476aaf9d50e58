"""`python -m lastgasp_megatron.start SCRIPT [ARGS]`: install the hooks, then run the script as Python would.

What `lastgasp run --framework megatron` starts in each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lastgasp.adapter import run_script
from lastgasp_megatron.installation import install


def main(arguments: Sequence[str]) -> None:
    """Run `SCRIPT [ARGS]` or `-m MODULE [ARGS]`; what it raises is not caught.

    Raises:
        ConfigError: there is no script.
    """
    run_script(arguments, install)


if __name__ == "__main__":
    main(sys.argv[1:])
