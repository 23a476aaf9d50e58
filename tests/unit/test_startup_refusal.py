"""A rank that refuses says so to its launcher by its exit code; its traceback comes first, and clean-up happens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lastgasp import exitcodes
from lastgasp.errors import ConfigError, ControlError, DeadlineExceeded, NoGoodCheckpoint
from lastgasp.startup_refusal import is_refusal

CODE = """
import atexit, sys
from lastgasp.errors import ConfigError, ControlError
from lastgasp.startup_refusal import tell_launcher

def outer(*args, inner):
    import io
    stderr, sys.stderr = sys.stderr, io.StringIO()
    inner(*args)
    text, sys.stderr = sys.stderr.getvalue(), stderr
    print("[rank0] " + text, file=sys.stderr)

tell_launcher(); tell_launcher()
inner = sys.excepthook
sys.excepthook = lambda *args: outer(*args, inner=inner)  # as torch.distributed does
atexit.register(print, "cleaned up")
raise ERROR
"""


@pytest.mark.parametrize(
    ("error", "launcher", "code"),
    [
        ("ConfigError('dir', 3, 'a path', 'Give one.')", "run", exitcodes.REFUSED),
        ("ControlError('gone')", "run", 1),
        ("ValueError('user')", "run", 1),
        ("SystemExit(5)", "run", 5),
        ("ConfigError('dir', 3, 'a path', 'Give one.')", "", 1),
    ],
)
def test_the_exit_code(error: str, launcher: str, code: int) -> None:
    env = os.environ | {"LASTGASP_LAUNCHER": launcher}
    command = [sys.executable, "-c", CODE.replace("ERROR", error)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code
    assert done.stdout == "cleaned up\n"
    if "System" not in error:
        assert "[rank0] Traceback" in done.stderr and error.partition("(")[0] in done.stderr


def test_which_errors_another_try_may_mend() -> None:
    assert is_refusal(ConfigError("a", 1, "b", "c")) and is_refusal(NoGoodCheckpoint("d", {}))
    assert not any(map(is_refusal, (ControlError("x"), DeadlineExceeded("a", 1, "b"), ValueError(), None)))
