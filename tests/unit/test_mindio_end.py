"""The end of a process whose `tft_destroy_processor` hangs (mindio_tft.md §16.1): what Python says stays true."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lastgasp.backends.ascend.mindio import shutdown

BEFORE = (
    "import atexit, ctypes, sys, threading, types",
    "atexit.register(print, 'a hook from before')",
    # As the destructors of a C++ library that waits for a thread of its own.
    "libc = ctypes.CDLL(None)",
    "libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)",
    "from lastgasp.backends.ascend.mindio import shutdown",
    "atexit.register(print, 'the hook of the job')",
    "api = types.SimpleNamespace(tft_destroy_processor=threading.Event().wait)",
    "atexit.register(api.tft_destroy_processor)",
    "assert not shutdown.destroy(api, 0.05)",
)


def end(*lines: str) -> subprocess.CompletedProcess[str]:
    """A process whose destroy hangs, and which ends like this."""
    code = "\n".join((*BEFORE, *lines))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise ValueError('boom')", 1, "ValueError: boom\n"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_code_and_hooks_survive(ending: str, code: int, said: str) -> None:
    ended = end(ending)
    assert (ended.returncode, ended.stdout) == (code, "the hook of the job\na hook from before\n"), ended.stderr
    assert ended.stderr.endswith(said)


def test_what_c_has_printed_is_not_lost() -> None:
    ended = end("libc.printf(b'from C\\n')")
    assert (ended.returncode, "from C\n" in ended.stdout) == (0, True)


def test_an_end_that_hangs_all_the_same_is_a_failure_and_not_for_ever() -> None:
    hang = "class Hangs:\n    def __del__(self, wait=threading.Event().wait): wait()\nkept = Hangs()"
    assert end("shutdown.END_LIMIT = 1", hang).returncode == -signal.SIGALRM


def test_a_clean_end_is_left_to_python() -> None:
    """No alarm, and nothing of C's hooks is cut off."""
    before = signal.getsignal(signal.SIGALRM)
    shutdown._bound_the_end()
    assert signal.getsignal(signal.SIGALRM) is before
