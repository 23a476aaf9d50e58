"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

from typing import Any

import pytest

from support.mindspore.importable import make_importable
from support.police import leak_police, restored_environ, runtime_directory

__all__ = ["leak_police", "restored_environ", "runtime_directory"]

pytest_plugins = ["pytester"]

make_importable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which worker has what, where `-n` asks for several."""
    from support.workers import ByGroup

    return ByGroup(config, log)
