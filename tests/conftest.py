"""Fixtures of all tests. The leak police watches each of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from support.mindspore.importable import make_importable
from support.police import leak_police, places_of_its_own, restored_environ

__all__ = ["leak_police", "places_of_its_own", "restored_environ"]

pytest_plugins = ["pytester"]

make_importable()

# Nothing about time: how long an example takes says more of the machine than of the code.
settings.register_profile("tests", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
