"""Where the files go, and parallel_group.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.steps import places
from lastgasp.steps.groups import groups_text
from lastgasp.steps.places import profiling_base, task_id

SAMPLE = b"""{
    "group_name_0": {
        "group_name": "tp",
        "group_rank": 0,
        "global_ranks": [
            0,
            1
        ]
    }
}"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No environment, no MindCluster, nothing said yet."""
    monkeypatch.delenv("LASTGASP_PROFILING_DIR", raising=False)
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    monkeypatch.setattr(places, "MINDCLUSTER", tmp_path / "cluster-info")
    caplog.set_level(logging.INFO, "lastgasp")
    places._say.cache_clear()
    yield
    places._say.cache_clear()


def test_without_mindcluster_it_is_a_directory_of_the_run_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 0, 1):
        assert profiling_base(tmp_path / "run", rank) == tmp_path / "run/profiling"
    seen = [r for r in caplog.records if r.levelno > logging.DEBUG]
    assert [(r.levelname, str(tmp_path / "run/profiling") in r.getMessage()) for r in seen] == [("INFO", True)]
    assert not (tmp_path / "cluster-info").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("there", [False, True])
def test_mindcluster_s_place_is_taken_where_it_can_be_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "cluster-info").mkdir()
    if there:
        (tmp_path / "cluster-info/profiling").mkdir()
    assert profiling_base(tmp_path / "run", 1) == tmp_path / "cluster-info/profiling"


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cluster-info").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert profiling_base(tmp_path / "run", 1) == tmp_path / "run/profiling"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "LASTGASP_PROFILING_DIR" in caplog.text


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster-info").mkdir()
    monkeypatch.setenv("LASTGASP_PROFILING_DIR", "~/marks")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiling_base(tmp_path / "run", 1) == tmp_path / "marks"


def test_the_task_is_mindcluster_s_or_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert task_id(1_795_247_866) == "default_task_id_1795247866"
    monkeypatch.setenv("MINDX_TASK_ID", "pytorch-job-7")
    assert task_id(1_795_247_866) == "pytorch-job-7"


@pytest.mark.parametrize("given", ["..", ".", "a/b", "/etc", "x" * 256])
def test_a_task_that_is_no_name_is_refused_with_a_warning(
    given: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINDX_TASK_ID", given)
    assert task_id(5) == "default_task_id_5"
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_the_groups_are_written_as_taskd_writes_them() -> None:
    entry: dict[str, Any] = {"global_ranks": (0, 1), "group_rank": 0, "group_name": "tp"}
    assert groups_text({"group_name_0": entry}) == SAMPLE
    assert groups_text({}) == b"{}"


def test_a_group_without_its_ranks_is_an_error() -> None:
    with pytest.raises(KeyError):
        groups_text({"g": {"group_name": "tp", "group_rank": 0}})
