"""The leak police: a pytest plugin that fails the test that left something behind, and names it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgasp.gasp import rundir
from lastgasp.launch.warm import SWITCH
from lastgasp.steps import ringfile
from support import leaks, prefork

GRACE_SECONDS = 60.0
"""How long processes and threads of a test may take to end on their own, on a loaded machine."""


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare threads, sockets, environment, signals, processes and shared memory around each test."""
    mark = uuid.uuid4().hex
    os.environ[leaks.MARK] = mark
    before = leaks.snapshot(mark)
    yield
    found = leaks.settle(before, mark, GRACE_SECONDS)
    if found:
        leaks.clean_up(before, mark)
        pytest.fail(f"{request.node.nodeid} leaked:\n  " + "\n  ".join(found), pytrace=False)


_logger = logging.getLogger("lastgasp")
LOGGING = _logger.level, _logger.propagate, _logger.handlers[:]
"""Of the tests' process, before any of them: fixtures of a whole file set it up as well."""


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """A command that sets up logging in the tests' process does it for the test that calls it, and for no later one."""
    yield
    level, _logger.propagate, _logger.handlers[:] = LOGGING
    _logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def places_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each run of tests, and each of its workers, directories of its own.

    Launchers make no warm process unless a test, or whoever runs the tests, sets LASTGASP_WARM: one job with one fault
    is over sooner without its imports.

    Controllers announce themselves in a place that the user's own `lastgasp ps` does not see; rings of step marks are
    in a folder of shared memory.
    """
    shared = Path("/dev/shm")
    rings = tempfile.mkdtemp(prefix="tests-of-lastgasp-", dir=shared if shared.is_dir() else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(rundir.VARIABLE, str(tmp_path_factory.mktemp("runtime")))
        patch.setenv(ringfile.VARIABLE, rings)
        patch.setenv(SWITCH, os.environ.get(SWITCH, "off"))
        yield
    shutil.rmtree(rings, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def prefork_images() -> Iterator[None]:
    """Launchers and ranks of the tests' jobs are forked where that makes no difference to them (`support.prefork`)."""
    with prefork.installed(prefork.images):
        yield


@pytest.fixture(autouse=True)
def cold(request: pytest.FixtureRequest) -> Iterator[None]:
    """`@pytest.mark.cold`: each process of this test is one of its own from its start, as users have it."""
    before = prefork.images.on
    prefork.images.on = before and request.node.get_closest_marker("cold") is None
    yield
    prefork.images.on = before


@pytest.fixture
def childrens_signal() -> Iterator[None]:
    """DataLoader takes SIGCHLD for its workers, for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def restored_environ() -> Iterator[None]:
    """For tests of frameworks that write to the environment (seeds, rendezvous): put it back afterwards."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
