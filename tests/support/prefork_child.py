"""`support.interpreter`, which may be forked from an image.

    prefork_child.py FILE [WHAT [ARGUMENT]]

Writes the facts to FILE. WHAT `again`: starts itself, with FILE.again. Else as there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import interpreter

PR_GET_PDEATHSIG = 2


def main() -> None:
    """Write, then end as told."""
    path, what = [*sys.argv[1:], ""][:2]
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death))
    facts = interpreter.interpreter() | {"environment": dict(os.environ), "death": death.value}
    Path(path).write_text(json.dumps(facts))
    print("written")
    if what == "again":
        sys.exit(subprocess.run([sys.executable, __file__, f"{path}.again"], check=False).returncode)
    del sys.argv[1]
    if what:
        interpreter.main()


if __name__ == "__main__":
    main()
