"""Where what is printed does not arrive, and what is said about it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import output
from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.errors import ConfigError
from lastgasp.exception_origin import may_pass


@contextmanager
def standard(fd: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A descriptor takes the place of standard output and error, as far as is looked at."""
    monkeypatch.setattr(output, "_STANDARD", (0, fd))
    yield
    os.close(fd)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """`ulimit -f`, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with standard(writing, monkeypatch):
        assert output.why_lost("") == "" and not output.is_lost(errno.EPIPE)
        os.close(reading)
        assert "nobody reads" in output.why_lost("ValueError: other")
        assert output.is_lost(errno.EPIPE) and not output.is_lost(errno.ENOSPC)


def test_a_device_that_is_always_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where that, or nothing, has ended the training: a full disk ends it by the same number."""
    with standard(os.open("/dev/full", os.O_WRONLY), monkeypatch):
        assert "/dev/full" in output.why_lost("OSError: [Errno 28] No space left on device")
        assert "/dev/full" in output.why_lost("")
        assert output.why_lost("ValueError: other") == ""
        assert not may_pass(OSError(errno.ENOSPC, "no space")) and may_pass(OSError(errno.EFBIG, "too large"))
    with standard(os.open("/dev/null", os.O_WRONLY), monkeypatch):
        assert output.why_lost("") == "" and may_pass(OSError(errno.ENOSPC, "no space"))


def test_a_file_that_may_not_grow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(4096))
    with standard(os.open(tmp_path / "log", os.O_WRONLY), monkeypatch):
        assert output.why_lost("") == ""
        with file_limit(4096):
            assert output.why_lost("OSError: [Errno 27] File too large").endswith("limit of 4096 bytes (ulimit -f)")
        with file_limit(4097):
            assert output.why_lost("") == ""


def test_a_buffer_that_may_not_be_as_large_is_refused_in_one_line() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with file_limit(8192), pytest.raises(ConfigError, match=r"RLIMIT_FSIZE=8192 is not allowed: .*ulimit -f"):
        CrashSafeBuffer(100)
    assert len(os.listdir("/proc/self/fd")) == before
