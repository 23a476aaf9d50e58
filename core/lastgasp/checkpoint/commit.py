"""Write a checkpoint so that a crash at any point leaves the old one or the new one, and both verify.

Order of a commit, under the lock of the directory:

1. data to temporary names, fsynced (`seal`);
2. the manifest durably to `<name>.manifest.next.json`;
3. data renamed into place, directory fsynced;
4. `.next` renamed over the manifest, directory fsynced.

Killed before 3, the old data stands with the old manifest. Killed after it, the new data stands with the
`.next` manifest, which readers accept when it is the one that the data fits (`pairing`); the next commit
puts it in place. Two processes that commit one name take turns. Of files the last one wins; of directories
the first, because a directory cannot be exchanged atomically: the second finds the same step of the same
job and discards its own, and any other directory of that name is refused.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from lastgasp._fs import DISK, Disk, locked, make_directory, replace_durably, unique_temp, write_atomically
from lastgasp.errors import CheckpointError, ConfigError
from lastgasp.ports import Layout

from .digest import HashingWriter
from .layout import next_path
from .manifest import FileEntry, Manifest, Provenance, build, encode
from .pairing import heal, read_pair


class Staged:
    """A checkpoint that is being written under temporary names. For one thread at a time.

    Use: `open` each file and write it, `seal`, `publish`; or `discard`. As a context manager it discards
    on leaving unless it was published. The thread that publishes may be another than the one that wrote.

    Args:
        target: where the checkpoint will stand.
        layout: the layout that its directory is read with.
        sha256: whether files get a SHA-256 too.
        disk: where the bytes go; tests give one that fails.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, target: Path, layout: Layout, *, sha256: bool = False, disk: Disk = DISK) -> None:
        self.target, self._layout, self._sha256, self._disk = target, layout, sha256, disk
        self._temp = unique_temp(target)
        self._writers: dict[str, HashingWriter] = {}
        self._adopted: dict[str, FileEntry] = {}
        self._ended = False
        make_directory(target.parent)

    def open(self, relative: str | None = None) -> HashingWriter:
        """A writer for one file.

        Args:
            relative: POSIX path relative to the target's parent, as in the manifest: `name` alone for a
                single file (the default), `name/part.pt` for a directory checkpoint.

        Raises:
            ConfigError: the path lies outside of the target, or mixes both kinds, or is open already.
            OSError: the file cannot be created.
        """
        relative = self.target.name if relative is None else relative
        path = self._temp_path(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = HashingWriter(self._disk.create(path, direct=True), sha256=self._sha256, disk=self._disk)
        self._writers[relative] = writer
        return writer

    @property
    def nbytes(self) -> int:
        """Bytes written so far, in all files."""
        return sum(writer.tell() for writer in self._writers.values())

    @property
    def first_byte_ns(self) -> int | None:
        """Wall-clock time of the first byte of any file, ns since the epoch; None before."""
        times = [writer.first_byte_ns for writer in self._writers.values() if writer.first_byte_ns]
        return min(times, default=None)

    def seal(self) -> None:
        """Make every file durable under its temporary name. Raises OSError."""
        for writer in self._writers.values():
            writer.finish()
        if self._temp.is_dir():
            for folder in (*self._temp.rglob("*"), self._temp):
                if folder.is_dir():
                    self._disk.sync_dir(folder)

    def sealed(self) -> tuple[Path, tuple[FileEntry, ...]]:
        """Where the files of this directory checkpoint wait, and what they are, for `adopt` elsewhere. Seals first.

        Raises OSError.
        """
        self.seal()
        return self._temp, tuple(writer.entry(relative) for relative, writer in sorted(self._writers.items()))

    def adopt(self, folder: Path, entries: tuple[FileEntry, ...]) -> None:
        """Take over the files that another process has sealed for the same directory checkpoint (`sealed`).

        Raises:
            ConfigError: a path lies outside of the target, or is there already.
            OSError: a file is gone, or the disk refused.
        """
        for entry in entries:
            path = self._temp_path(entry.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._disk.rename(folder.joinpath(*entry.path.split("/")[1:]), path)
            self._adopted[entry.path] = entry
        with contextlib.suppress(OSError):
            self._disk.remove(folder)

    def publish(self, provenance: Provenance) -> Manifest:
        """Make the checkpoint visible, durably. Seals first. Returns the manifest that now stands there.

        Raises:
            CheckpointError: already ended, nothing was written, or another directory stands there.
            OSError: the disk refused; what stood there before still stands and verifies.
        """
        if self._ended or not (self._writers or self._adopted):
            raise CheckpointError(
                f"{self.target}: nothing to publish. Open and write a file first; publish once, not after discard."
            )
        self.seal()
        own = {relative: writer.entry(relative) for relative, writer in self._writers.items()}
        entries = tuple(entry for _, entry in sorted((own | self._adopted).items()))
        manifest = build(provenance, entries)
        with locked(self.target.parent):
            heal(self.target, self._layout, self._disk)
            standing = self._standing_directory(manifest)
            if standing is None:
                self._put_in_place(manifest)
        self._ended = standing is None
        self.discard()
        return standing or manifest

    def discard(self) -> None:
        """Remove the temporary files of a checkpoint that is not published. Never raises OSError."""
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        if not self._ended:
            self._ended = True
            with contextlib.suppress(OSError):
                self._disk.remove(self._temp)

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _put_in_place(self, manifest: Manifest) -> None:
        path = self._layout.manifest_path(self.target)
        write_atomically(next_path(path), encode(manifest), self._disk)
        replace_durably(self._temp, self.target, self._disk)
        replace_durably(next_path(path), path, self._disk)

    def _standing_directory(self, ours: Manifest) -> Manifest | None:
        """The manifest of a directory that already is what we want to publish; None when nothing is there.

        Raises CheckpointError for any other directory (or for a file where a directory shall go).
        """
        if not self.target.is_dir() and not self._temp.is_dir():
            return None
        if not self.target.exists():
            return None
        found = read_pair(self.target, self._layout)
        if isinstance(found, Manifest) and (found.job, found.step) == (ours.job, ours.step):
            return found
        raise CheckpointError(
            f"{self.target} exists and is not step {ours.step} of job {ours.job!r}. "
            "A directory checkpoint is never overwritten. Save under a name of its own, or move that one away."
        )

    def _temp_path(self, relative: str) -> Path:
        name, _, rest = relative.partition("/")
        parts = rest.split("/") if rest else []
        single = not parts
        others = self._writers.keys() | self._adopted.keys()
        mixed = any(("/" in other) == single for other in others) or relative in others
        if name != self.target.name or mixed or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(
                "relative",
                relative,
                f"{self.target.name!r} alone, or paths below it, each once",
                "Give the path relative to the directory that holds the checkpoint.",
            )
        return self._temp.joinpath(*parts)
