"""What the checkpoint tests share: small checkpoints, a disk that dies, ranks that are threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lastgasp._fs import Disk
from lastgasp.checkpoint import DirectoryLayout, Manifest, Provenance, ScatteredLayout, SingleFile, Staged
from lastgasp.checkpoint.manifest import Kind
from lastgasp.ports import Gather

T = TypeVar("T")
FILES = SingleFile()
FOLDERS = DirectoryLayout("iter_*")
SCATTERED = ScatteredLayout(
    pattern=r"rank_(?P<rank>\d+)/(?P<net>.+)_rank_(?P=rank)-(?P<step>\d+)\.bin",
    title=r"\g<net>-\g<step>",
    names=r".+-(?P<step>\d+)",
    folders=("rank_*",),
)


def provenance(step: int, kind: Kind = "gasp", job: str = "job") -> Provenance:
    return Provenance(format="test", step=step, kind=kind, job=job)


def put_file(
    directory: Path, step: int, data: bytes | None = None, *, kind: Kind = "gasp", job: str = "job"
) -> Path:
    """A verified single-file checkpoint `step-N.ckpt`."""
    path = directory / f"step-{step:08d}.ckpt"
    publish(path, f"data of {step} ".encode() * 1000 if data is None else data, provenance(step, kind, job))
    return path


def publish(path: Path, data: bytes, about: Provenance, disk: Disk | None = None) -> Manifest:
    with Staged(path, FILES, disk=disk or Disk()) as staged:
        staged.open().write(data)
        return staged.publish(about)


def put_folder(directory: Path, step: int, parts: int = 2) -> Path:
    """A verified directory checkpoint `iter_N` of some files, one of them in a folder."""
    path = directory / f"iter_{step:07d}"
    with Staged(path, FOLDERS) as staged:
        for part in range(parts):
            staged.open(f"{path.name}/rank{part}/shard.pt").write(f"{step} {part} ".encode() * 1000)
        staged.open(f"{path.name}/common.pt").write(b"common")
        staged.publish(provenance(step))
    return path


def scattered_name(rank: int, step: int) -> str:
    """The place of a rank's file of `net-STEP`."""
    return f"rank_{rank}/net_rank_{rank}-{step}.bin"


def put_scattered(
    directory: Path, step: int, contents: Sequence[bytes] | None = None, disk: Disk | None = None, job: str = "job"
) -> Path:
    """A verified checkpoint `net-STEP` of one file per rank, and the markers of the ranks."""
    path = directory / f"net-{step}"
    with Staged(path, SCATTERED, disk=disk or Disk()) as staged:
        for rank, content in enumerate(contents or [f"{step} {rank} ".encode() * 1000 for rank in range(2)]):
            staged.open(scattered_name(rank, step)).write(content)
        markers = {f"rank_{rank}/newest": str(step).encode() for rank in range(2)}
        staged.publish(provenance(step, job=job), markers=markers, aside=True)
    return path


class Died(BaseException):
    """The process would be dead here."""


class DyingDisk(Disk):
    """Dies at call number `at`, and at every later one; `calls` counts."""

    def __init__(self, at: int = 1 << 30) -> None:
        self.at, self.calls = at, 0
        self.log: list[str] = []
        self._lock = threading.Lock()

    def _call(self, name: str) -> None:
        with self._lock:
            self.calls += 1
            self.log.append(name)
            if self.calls > self.at:
                raise Died(name)

    def create(self, path: Path, *, direct: bool = False) -> int:
        self._call("create")
        return super().create(path, direct=direct)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        self._call("pwrite")
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        super().fsync(fd)

    def rename(self, src: Path, dst: Path) -> None:
        self._call("rename")
        super().rename(src, dst)

    def exchange(self, one: Path, other: Path) -> bool:
        self._call("exchange")
        return super().exchange(one, other)

    def link(self, src: Path, dst: Path) -> None:
        self._call("link")
        super().link(src, dst)

    def sync_dir(self, directory: Path) -> None:
        self._call("sync_dir")
        super().sync_dir(directory)

    def remove(self, path: Path) -> None:
        self._call("remove")
        super().remove(path)


def as_ranks(world_size: int, body: Callable[[int, Gather], T]) -> list[T]:
    """Run `body(rank, gather)` on one thread per rank; returns the results, raises the first error."""
    barrier = threading.Barrier(world_size, timeout=150)
    slots: dict[tuple[str, int], list[bytes]] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        used = Counter[str]()

        def gather(tag: str, payload: bytes) -> list[bytes]:
            used[tag] += 1
            slot = slots.setdefault((tag, used[tag]), [b""] * world_size)
            slot[rank] = payload
            barrier.wait()
            return list(slot)

        try:
            results[rank] = body(rank, gather)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
