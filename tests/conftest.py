"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

from support.police import leak_police, restored_environ

__all__ = ["leak_police", "restored_environ"]

pytest_plugins = ["pytester"]
