"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.durations import family, note_durations, seconds
from support.failures import note_failures
from support.mindspore.importable import make_importable
from support.police import (
    childrens_signal,
    cold,
    leak_police,
    places_of_its_own,
    prefork_images,
    restored_environ,
    restored_logging,
)
from support.products import add_option, deselect_covered
from support.shares import shares
from support.surroundings import scrub

__all__ = [
    "childrens_signal", "cold", "leak_police", "places_of_its_own", "prefork_images", "restored_environ",
    "restored_logging",
]  # fmt: skip

pytest_plugins = ["pytester"]

scrub(os.environ)
make_importable()

# Tests and their jobs fill all cores as it is: threads of torch that wait for each other by spinning double what a test
# costs. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Nothing about time: how long an example takes says more of the machine than of the code. The same examples in each
# run, so that one that fails is found by who changes the code, and not by anybody later; TESTS_COLD=1 draws others.
settings.register_profile(
    "tests",
    max_examples=50,
    deadline=None,
    derandomize=not os.environ.get("TESTS_COLD"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    note_failures(config)
    note_durations(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are made and none is garbage: searching them again and again takes a third of the time.

    Nor are they searched later: that would take half a second wherever the leak police, or a test, collects garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with long tests; one process alone runs all in the order of their files."""
    deselect_covered(config, items)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = shares(items, workers, seconds, family)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test has logged may hold bytes that are not text; they would end the whole run on their way to xdist."""
    return _as_text((yield))


def _as_text(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {_as_text(key): _as_text(value) for key, value in data.items()}
    return type(data)(map(_as_text, data)) if isinstance(data, list | tuple) else data
