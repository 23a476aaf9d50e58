"""Files in memory, also where Python, the system or a container's profile has none."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgasp import memory_file as module
from lastgasp.arena import Arena, in_use
from lastgasp.memory_file import memory_file


def _is_of_no_use_to_children(number: int) -> None:
    os.write(number, b"said")
    with open(f"/proc/{os.getpid()}/fd/{number}", "rb") as file:
        assert file.read() == b"said"
    assert not os.get_inheritable(number)
    os.close(number)


def test_a_python_built_for_an_older_libc_has_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memfd_create", "MFD_CLOEXEC"):
        monkeypatch.delattr(os, name)
    number = memory_file("ours")
    assert os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:ours")
    _is_of_no_use_to_children(number)


def test_where_there_are_none_a_file_without_a_name_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memfd", _refused(errno.EPERM))
    number = memory_file("ours")
    assert os.fstat(number).st_nlink == 0
    _is_of_no_use_to_children(number)
    arena = Arena()
    arena.reserve(1 << 16)
    assert in_use()[1] >= 1
    arena.close()


def test_a_folder_that_is_full_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a container's /dev/shm: what is made there would find no room later."""
    allocate, full = os.posix_fallocate, []

    def no_room(number: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").startswith("/dev/shm/"):
            full.append(number)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(number, offset, length)

    monkeypatch.setattr(module, "_memfd", _refused(errno.EPERM))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    number = memory_file("ours")
    assert full and os.readlink(f"/proc/self/fd/{number}").startswith(f"{tmp_path}/ours-")
    assert os.fstat(number).st_size == 0
    _is_of_no_use_to_children(number)


def test_descriptors_that_have_run_out_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memfd", _refused(errno.EMFILE))
    with pytest.raises(OSError) as raised:
        memory_file("ours")
    assert raised.value.errno == errno.EMFILE


def test_linux_6_3_to_6_6_may_forbid_those_that_can_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    memfd = module._memfd

    def strict(name: str, flags: int) -> int:
        return memfd(name, flags) if flags & 8 else _refused(errno.EACCES)(name, flags)

    monkeypatch.setattr(module, "_memfd", strict)
    number = memory_file("ours")
    assert os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:ours")
    _is_of_no_use_to_children(number)


def _refused(number: int) -> Callable[[str, int], int]:
    def memfd(name: str, flags: int) -> int:
        raise OSError(number, os.strerror(number), name)

    return memfd
