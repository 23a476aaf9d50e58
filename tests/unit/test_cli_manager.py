"""`lastgasp manager`: what it would tell TaskD, and what it refuses."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

from lastgasp.cli import _ascend, main
from lastgasp.errors import ConfigError
from lastgasp.launch.ascend import Prepared

NAMES = ("MINDX_TASK_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MS_WORKER_NUM", "MS_LOCAL_WORKER", "POD_IP", "TTP_PORT")


def run(*arguments: str, **env: str) -> tuple[int, str]:
    """Exit code and output."""
    done = CliRunner(env={**dict.fromkeys(NAMES), **env}).invoke(main, ["manager", *arguments])
    return done.exit_code, done.output


def test_dry_run() -> None:
    env = {"MINDX_TASK_ID": "job-1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "POD_IP": "10.0.0.1"}
    code, output = run("--dry-run", **env, TTP_PORT="8000")
    assert (code, output) == (0, "job job-1: 2 pods of 8 ranks, at 10.0.0.1:9601, MindIO controller at port 8000\n")
    code, output = run("--dry-run", "--nodes", "4", **env, TASKD_PROCESS_ENABLE="off")
    assert (code, output) == (0, "job job-1: 4 pods of 8 ranks, at 10.0.0.1:9601, no MindIO controller\n")


def test_outside_of_a_job() -> None:
    code, output = run("--dry-run")
    assert code == 2
    assert "MINDX_TASK_ID=None is not allowed" in output


@pytest.mark.parametrize("option", ["--nodes", "--procs-per-node"])
def test_wrong_sizes(option: str) -> None:
    code, output = run("--dry-run", option, "0", MINDX_TASK_ID="j", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert code == 2, output


def test_a_manager_that_ends_before_the_job_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told, words = threading.Event(), []

    def tell(text: str, *more: object) -> None:
        words.append(text % more)
        told.set()

    monkeypatch.setattr(_ascend.log, "error", tell)
    with _ascend._beside("TaskD's manager", "lastgasp", "manager", "--nodes", "0"):
        assert told.wait(60)
    assert words == ["TaskD's manager has ended with code 2 before the job did; see above. The job continues without"]


def test_what_runs_beside_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    monkeypatch.setattr(_ascend.log, "error", lambda text, *more: words.append(text))
    with _ascend._beside("a pipe's reader", "asyncio"):
        pass
    assert words == [], "the job ended before it"


def test_a_job_whose_workers_wait_for_the_manager_is_refused_without(
    monkeypatch: pytest.MonkeyPatch, restored_environ: None
) -> None:
    """TaskD's agent would start none, and give up after three minutes (docs/facts/taskd.md §2)."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ConfigError, match="MINDX_TASK_ID"),
        _ascend.helpers_running(Prepared(manager=True, taskd_agent=True)),
    ):
        pass
