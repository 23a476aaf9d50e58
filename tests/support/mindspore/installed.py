"""An environment where lastgasp is installed as a wheel would install it: on top of the real MindSpore's.

Python's start-up reads our `.pth` there, so that a flag in a YAML is all that a job needs, with plain msrun.
"""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

from support.mindspore import place

ROOT = place.HERE.parents[2]
PLUGIN = ROOT / "plugins/mindformers"
_MSRUN = """#!{python}
import sys
from mindspore.parallel.cluster.run import main
sys.exit(main())
"""


def make(folder: Path, version: str = place.MAIN) -> Path:
    """Make it.

    Returns:
        The folder, to be named by `place.INSTEAD`.
    """
    code = "import sys; print(*[path for path in sys.path if path.endswith('site-packages')])"
    command = [str(place.python(version)), "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    venv.create(folder, symlinks=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "a_installed.pth").write_text("".join(f"{path}\n" for path in [ROOT / "core", PLUGIN, *found]))
    for name in ("_lastgasp_boot.py", "_lastgasp_boot.pth"):
        shutil.copy(PLUGIN / name, packages)
    msrun = folder / "bin/msrun"
    msrun.write_text(_MSRUN.format(python=folder / "bin/python"))
    msrun.chmod(0o755)
    return folder
