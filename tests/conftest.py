"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

from support.mindspore.importable import make_importable
from support.police import leak_police, restored_environ, runtime_directory

__all__ = ["leak_police", "restored_environ", "runtime_directory"]

pytest_plugins = ["pytester"]

make_importable()
