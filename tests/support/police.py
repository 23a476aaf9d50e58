"""The leak police: a pytest plugin that fails the test that left something behind, and names it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from support import leaks

GRACE_SECONDS = 2.0
"""How long what a test started may take to end by itself."""


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare threads, sockets, environment, signals, processes and shared memory around each test."""
    mark = uuid.uuid4().hex
    os.environ[leaks.MARK] = mark
    before = leaks.snapshot(mark)
    yield
    found = leaks.settle(before, mark, GRACE_SECONDS)
    leaks.clean_up(before, mark)
    if found:
        pytest.fail(f"{request.node.nodeid} leaked:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Controllers of tests announce themselves where no `lastgasp ps` of the user looks, nor finds anything."""
    variable, leaks.base = "LASTGASP_RUNTIME_DIR", str(tmp_path_factory.getbasetemp())
    before = os.environ.get(variable)
    os.environ[variable] = str(tmp_path_factory.mktemp("runtime"))
    yield
    if before is None:
        del os.environ[variable]
    else:
        os.environ[variable] = before


@pytest.fixture
def restored_environ() -> Iterator[None]:
    """For tests of frameworks that write to the environment (seeds, rendezvous): put it back afterwards."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
