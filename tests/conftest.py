"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support.mindspore.importable import make_importable
from support.police import leak_police, restored_environ, runtime_directory

__all__ = ["leak_police", "restored_environ", "runtime_directory"]

pytest_plugins = ["pytester"]

make_importable()


@functools.cache
def group_of(module: Path) -> str:
    """Which worker of pytest-xdist has its tests.

    One has MindSpore's: they wait more than they compute, and only one msrun may be up at a time. One has the other
    jobs; so no test shares the machine with two others. Whichever is free takes quick tests, a module at a time.
    """
    if "from support.mindspore" in module.read_text():
        return "mindspore"
    return module.stem if module.parent.name in ("arch", "unit") else "jobs"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say it to pytest-xdist, where it is used."""
    item.add_marker(pytest.mark.xdist_group(group_of(item.path)))
