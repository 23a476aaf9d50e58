"""Compiles the extensions in C where a wheel or an editable install is built and a C compiler is there.

Without one the install goes on, and Python does the same: slower, otherwise alike. It is said once (`pip install -v`
shows it; a process that would have used one says it again), and is never an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("lastgasp/steps/_ring.c", "lastgasp/pytorch/_copies.c")
"""The marks' writer, and the copies of random state and buffers."""
LIMIT = 120.0
"""Seconds that the compiler may take; it needs one."""


class ExtensionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the extension to a wheel; for an editable install it puts it beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build; `version` is `standard` or `editable`."""
        if self.target_name != "wheel":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="lastgasp-build-"))
        reasons = [self._add(Path(source), version, build_data) for source in SOURCES]
        if any(reasons):
            self.app.display_info(f"lastgasp: step marks will be written by Python, not by C: {max(reasons)}")

    def _add(self, source: Path, version: str, build_data: dict[str, Any]) -> str:
        """Compile one; returns why there is none."""
        library = self._folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
        installed = Path(self.root) / "core" / source.with_name(library.name)
        if version == "editable":
            # What an earlier build has left may not fit the source any more.
            installed.unlink(missing_ok=True)
        reason = compile_extension(Path(self.root) / "core" / source, library)
        if not reason and version == "editable":
            shutil.copy2(library, temporary := installed.with_name(f".{installed.name}.{os.getpid()}"))
            temporary.replace(installed)
        elif not reason:
            build_data["force_include"][str(library)] = str(source.with_name(library.name))
            build_data["pure_python"], build_data["infer_tag"] = False, True
        return reason

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after each build."""
        if self.target_name == "wheel":
            shutil.rmtree(self._folder, ignore_errors=True)


def compile_extension(source: Path, library: Path) -> str:
    """Compile one file into one shared object, with `CC` and `CFLAGS` of the environment.

    Returns:
        Why there is none; empty where there is one.
    """
    if os.environ.get("LASTGASP_PURE_PYTHON") == "1":
        return "LASTGASP_PURE_PYTHON=1"
    if sys.platform != "linux":
        return f"the extension is for Linux, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or _of_python() or "cc")
    include = [f"-I{folder}" for folder in {sysconfig.get_path(name) for name in ("include", "platinclude")}]
    flags = ["-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", *shlex.split(os.environ.get("CFLAGS", ""))]
    command = [*compiler, *flags, *include, str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no C compiler: {error}"
    if done.returncode == 0 and library.exists():
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return f"{shlex.join(compiler)} ended with {done.returncode}: {lines[0] if lines else 'it said nothing'}"


def _of_python() -> str:
    """The compiler that Python itself was built with, where it is here; a downloaded Python names another machine's."""
    compiler = sysconfig.get_config_var("CC") or ""
    return compiler if compiler and shutil.which(shlex.split(compiler)[0]) else ""
