"""Where the tests find Megatron, and that `make test` cannot pass without it unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.megatron import place

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESTS_MEGATRON", str(tmp_path))
    monkeypatch.delenv(place.NEEDED, raising=False)


def test_the_version_is_that_of_the_constraints() -> None:
    assert f"megatron-core=={place.VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert place.folder() == Path(os.environ["TESTS_MEGATRON"])


def test_without_it_tests_are_skipped_and_say_how_to_get_it() -> None:
    assert "python -m support.megatron.place" in place.missing() or "not installed" in place.missing()


def test_where_make_has_fetched_it_a_missing_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(place.NEEDED, "1")
    with pytest.raises(RuntimeError, match=place.NEEDED):
        place.missing()


def test_make_test_asks_for_that() -> None:
    done = subprocess.run(
        ["make", "-n", "-p", "test"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert f"export {place.NEEDED} := 1" in (ROOT / "Makefile").read_text()
    rules = [line for line in done.stdout.splitlines() if line.startswith(("tests: ", "test-full: "))]
    assert any(".venv/.megatron" in line for line in rules if line.startswith("tests: ")), rules
    assert any(".venv/.megatron" in line for line in rules if line.startswith("test-full: ")), rules


def test_collecting_the_real_jobs_without_it_is_an_error_there() -> None:
    path = ROOT / "tests/frameworks/test_megatron_job.py"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(path)]
    env = os.environ | {place.NEEDED: "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=env)
    assert done.returncode == 2 and place.NEEDED in done.stdout
