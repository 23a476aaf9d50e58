"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

from support.mindspore.importable import make_importable
from support.police import leak_police, places_of_its_own, restored_environ

__all__ = ["leak_police", "places_of_its_own", "restored_environ"]

pytest_plugins = ["pytester"]

make_importable()
