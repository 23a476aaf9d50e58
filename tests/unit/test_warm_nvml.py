"""What torch leaves open of NVML where imports have asked it for a GPU does not keep the warm process from forking."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NVML = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
static int open_count, descriptor;
static pthread_t thread;
static void *wait_for_ever(void *nothing) { for (;;) pause(); }
int nvmlInit(void) {
    if (!open_count++) descriptor = open("/proc/self/stat", O_RDONLY);
    if (!thread && !pthread_create(&thread, 0, wait_for_ever, 0)) pthread_setname_np(thread, "cuda00001800007");
    return 0;
}
int nvmlShutdown(void) { if (!open_count) return 1; if (!--open_count) close(descriptor); return 0; }
int held(void) { return open_count; }
"""
"""As the real one of driver 580: a GPU's devices are open from the first nvmlInit to the last nvmlShutdown; the
thread stays."""
ASK = """
import ctypes, sys, types
from lastgasp.launch.warm_checks import close_nvml, files, threads
if sys.argv[1] == "pynvml":
    sys.modules["pynvml"] = types.SimpleNamespace(_nvmlLib_refcount=1)
before = len(files())
close_nvml()  # nothing has loaded it
for _ in range(3):
    ctypes.CDLL("libnvidia-ml.so.1").nvmlInit()
assert len(files()) == before + 1
close_nvml()
print(ctypes.CDLL("libnvidia-ml.so.1").held(), len(files()) - before, threads())
"""


@pytest.mark.parametrize(("holder", "held"), [("torch", "0 0 1"), ("pynvml", "3 1 1")])
def test_only_what_torch_has_opened_is_closed(holder: str, held: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "nvml.c"
    source.write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    ask = [sys.executable, "-c", ASK, holder]
    found = subprocess.run(ask, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == held, found.stderr
