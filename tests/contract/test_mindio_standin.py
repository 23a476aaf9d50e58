"""The stand-in refuses what the real package would refuse, ignore or hang on, and has it on record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port
from support.recovery_backends import TORCH, Trace

START = """
import threading
import mindio_ttp.controller_ttp as c
import mindio_ttp.framework_ttp as f
c.tft_init_controller(-1, 1, False)
c.tft_start_controller("127.0.0.1", port, False, "")
f.tft_init_processor(0, 1, False, False, "", False)
f.tft_start_processor("127.0.0.1", port, "")
"""
GROUP = "[{'rank_list': [0], 'replica_cnt': 1, 'replica_shift': 0}]"
READY = (
    f"f.tft_is_reboot_node(); f.tft_set_optimizer_replica(0, {GROUP}); "
    "[getattr(f, f'tft_register_{name}_handler')(print) for name in ('save_ckpt', 'rename', 'stop', 'clean')]"
)
STEPPED = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); "
    "f.tft_start_updating_os(-1); f.tft_end_updating_os(1); f.tft_pause_train(1)"
)
HANDLERS = (
    "f.tft_register_stop_handler(lambda *_: f.tft_pause_train(1)); "
    "f.tft_register_save_ckpt_handler(lambda *_: f.tft_report_error(0))"
)
THREAD = "t = threading.Thread(target=lambda: f.tft_init_processor(0, 1, False, False)); t.start(); t.join()"


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("c.tft_init_controller(-1, 1, 0)", "TypeError", "enable_local_copy=0 is a int, not a bool"),
        ("c.tft_init_controller(-1, 1.0, False)", "TypeError", "world_size=1.0 is a float"),
        ("c.tft_init_controller(1, 1, False)", "Exception", "rank 1 of 1"),
        ("c.tft_start_controller('127.0.0.1', port, False, '')", "SystemExit", ""),  # the port is busy
        ("c.tft_start_controller('0.0.0.0', 8000, False, '')", "SystemExit", "start_controller('0.0.0.0', 8000"),
        ("c.tft_start_controller('127.0.0.1', 8000)", "SystemExit", "True"),  # TLS is on by default
        ("c.tft_register_mindx_callback('report_result', print)", "", "after start_controller"),
        ("f.tft_report_error(f.ReportState.RS_UNKNOWN)", "TypeError", "is a ReportState, not a int"),
        ("f.tft_report_error(0, 'x' * 16)", "Exception", "report_error(0"),
        (f"f.tft_set_optimizer_replica(0, {GROUP.replace('1, ', '2, ')})", "Exception", "replica_cnt 2 of 1"),
        ("f.tft_set_optimizer_replica(0, [])", "Exception", "no info"),
        ("f.tft_set_optimizer_replica(0, [{'rank_list': (0,)}])", "Exception", "rank_list"),
        ("f.tft_is_reboot_node(); f.tft_is_reboot_node()", "", "is_reboot_node again"),
        (f"f.tft_set_optimizer_replica(0, {GROUP})", "", "before is_reboot_node"),
        (f"{READY}; f.tft_start_updating_os(-1)", "", "MindIO's handler of SIGTERM"),
        (f"{READY}; {STEPPED}; f.tft_start_updating_os(-1); f.tft_end_updating_os(1)", "", "behind step 1"),
        (f"{HANDLERS}; f._p.call('stop', None)", "", "tft_pause_train was called inside the stop handler"),
        (f"{HANDLERS}; f._p.dump_step = 1; f._p.call_save([])", "", "report_error was called inside the save_ckpt"),
        ("f.tft_report_error(0, 7)", "TypeError", "error_code=7"),
        ("f.tft_report_load_ckpt_step(1.0)", "TypeError", "step=1.0"),
        ("f.tft_start_updating_os(-1)", "", "without replica info or without handlers for"),
        (f"{READY}; f._p.handlers.pop('rename'); f.tft_start_updating_os(-1)", "", "without handlers for"),
        (f"f.tft_is_reboot_node(); f.tft_set_optimizer_replica(1, {GROUP})", "", "replica info of rank 1 in [0]"),
        (
            "f.tft_register_stop_handler(lambda *_: f.tft_destroy_processor()); f._p.call('stop', None)",
            "",
            "tft_destroy_processor was called inside the stop handler",
        ),
        ("f.tft_start_updating_os(-1.0)", "TypeError", "backup_step=-1.0"),
        ("f.tft_end_updating_os(0)", "Exception", "end_updating(0)"),
        ("f.tft_end_updating_os(3)", "", "without start_updating is ignored"),
        ("f.tft_register_stop_handler(None)", "TypeError", "not callable"),
        (THREAD, "", "must be called on the main thread"),
        ("f.tft_init_processor(0, 1, False, False)", "Exception", "init_processor in state NORMAL"),
    ],
)
def test_what_is_refused(tmp_path: Path, code: str, error: str, words: str) -> None:
    trace, done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (error or "nothing")
    assert words in trace.violations()
    if error != "SystemExit" or words:
        assert trace.violations()


@pytest.mark.parametrize(
    "code",
    [
        "f.tft_init_processor(1, 1, False, False)",
        "f.tft_init_processor(0, 1, False)",  # TLS is on by default
        "f._p.state = 'INITED'; f.tft_start_processor('0.0.0.0', 8000, '')",
        "f._p.state = 'INITED'; f.tft_start_processor('127.0.0.1', 80, '')",
    ],
)
def test_what_ends_the_process(tmp_path: Path, code: str) -> None:
    trace, done = run(tmp_path, code)
    assert done.returncode == 2
    assert trace.violations()


def test_what_is_right_breaks_nothing(tmp_path: Path) -> None:
    trace, done = run(tmp_path, f"{READY}; {STEPPED}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing"), done.stderr
    assert trace.violations() == ""


def run(directory: Path, code: str) -> tuple[Trace, subprocess.CompletedProcess[str]]:
    """A process with controller and processor, then the code; it prints the error's type."""
    lines = [
        f"port = {free_port()}", START, "try:", f"    {code}", "    print('nothing')",
        "except BaseException as error:", "    print(type(error).__name__)",
    ]  # fmt: skip
    more = {"MINDIO_STANDIN_SCALE": "0.01", "MINDIO_STANDIN_EXIT_WAIT": "0.1"}
    environment = {"PATH": "/usr/bin:/bin"} | TORCH.environment(directory) | more
    command = [sys.executable, "-c", "\n".join(lines)]
    return Trace(directory), subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
