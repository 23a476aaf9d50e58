"""Writes a checkpoint such that a crash at any point leaves the old or the new one, and either verifies.

Order of a commit, under the lock of the directory:

1. data to temporary names, fsynced (`seal`);
2. the manifest durably to `<name>.manifest.next.json`;
3. data renamed into place, directory fsynced;
4. `.next` renamed over the manifest, directory fsynced.

If killed before 3, the old data and manifest remain. If killed after it, the new data is there with the `.next`
manifest, which readers accept if the data matches it (`manifest_lookup`); the next commit puts it in place. If killed
between the renames of scattered files, the data matches neither, and nothing of that name is used. Two processes that
commit the same name take turns. For single files the last one wins, unless the first is known to be of the same
attempt (`present`). For directories and scattered files the first wins, because no other system call replaces them:
the second finds the same step of the same job, whole as far as names and sizes tell, and discards its own; anything
else of that name, and what an earlier attempt has left (`present`), is refused or, if requested, moved aside. If the
second is killed before its own is in place, `put_back` undoes the move. Where a directory is to be replaced
(`last.ckpt`), it changes places with the new one in one call, and is removed behind the manifest; if the file system
cannot do that it is moved aside meanwhile.

The framework's own files that name the newest checkpoint (`markers`) are replaced after the data and before the
manifest, so they never name missing data.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from lastgasp._fs import DISK, Disk, locked, make_directory, replace_durably, unique_temp, write_atomically
from lastgasp.errors import CheckpointError, ConfigError
from lastgasp.ports import Layout

from .adopt import read_files
from .digest import READ_SIZE, HashingWriter
from .layout import next_path
from .manifest import FileEntry, Manifest, ManifestProblem, Provenance, build, encode, read
from .manifest_lookup import heal, read_pair
from .moving import manifest_aside, set_aside
from .structure import compare

log = logging.getLogger("lastgasp")

_SAME = ("job", "attempt", "step", "kind", "fit")
"""What identifies commits of the same step of the same attempt."""


class Staged:
    """A checkpoint that is being written under temporary names. For one thread at a time.

    Use: `open` each file and write it, `seal`, `publish`; or `discard`. As a context manager it discards
    on exit unless it was published. One thread may write and another publish.

    Args:
        target: the path of the finished checkpoint.
        layout: the layout that its directory is read with.
        sha256: whether files get a SHA-256 too.
        disk: performs the writes; tests pass one that fails.
        moved: called after each chunk that is written, as progress.

    Attributes:
        kept: after `publish`, a text about another process's checkpoint of this step that was kept instead; or empty.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(
        self,
        target: Path,
        layout: Layout,
        *,
        sha256: bool = False,
        disk: Disk = DISK,
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self.target, self._layout, self._sha256, self._disk, self._moved = target, layout, sha256, disk, moved
        self._temp = unique_temp(target)
        self._writers: dict[str, HashingWriter] = {}
        self._adopted: dict[str, FileEntry] = {}
        self._taken = 0
        self._ended = False
        self.kept = ""
        self._scattered = not layout.owns(target, target.name)
        make_directory(target.parent)

    def open(self, relative: str | None = None) -> HashingWriter:
        """Open a writer for one file.

        Args:
            relative: POSIX path relative to the target's parent, as in the manifest: `name` alone for a
                single file (the default), `name/part.pt` for a directory checkpoint, the place of each
                scattered file.

        Raises:
            ConfigError: the path lies outside of the target, or mixes both kinds, or is already open.
            OSError: the file cannot be created.
        """
        relative = self.target.name if relative is None else relative
        path = self._temp_path(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = self._disk.create(path, direct=True)
        writer = HashingWriter(fd, sha256=self._sha256, disk=self._disk, moved=self._moved)
        self._writers[relative] = writer
        return writer

    def link(self, relative: str, same_as: str) -> None:
        """Store what `open` has written for `same_as` under a second path: a hard link, or a copy if links are refused.

        Seals that file; write to it before.

        Raises:
            ConfigError: the path is not allowed (as `open`), or `same_as` was not opened.
            OSError: the disk refused.
        """
        if same_as not in self._writers:
            raise ConfigError("same_as", same_as, f"one of {sorted(self._writers)}", "Open and write it first.")
        writer, path, source = self._writers[same_as], self._temp_path(relative), self._temp_path(same_as, new=False)
        writer.finish()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._disk.link(source, path)
        except OSError:
            self._copy(source, relative)
        else:
            self._adopted[relative] = msgspec.structs.replace(writer.entry(same_as), path=relative)

    def _copy(self, source: Path, relative: str) -> None:
        writer = self.open(relative)
        with source.open("rb", buffering=0) as file:
            while piece := file.read(READ_SIZE):
                writer.write(piece)

    @property
    def nbytes(self) -> int:
        """Bytes that this process has written so far."""
        return sum(writer.tell() for writer in self._writers.values()) + self._taken

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
        """Return where the files of this checkpoint are, with their entries, for `adopt` elsewhere. Seals first.

        For directories and scattered files.

        Raises OSError.
        """
        self.seal()
        return self._temp, self._entries()

    def _entries(self) -> tuple[FileEntry, ...]:
        own = {relative: writer.entry(relative) for relative, writer in self._writers.items()}
        return tuple(entry for _, entry in sorted((own | self._adopted).items()))

    def adopt(self, folder: Path, entries: tuple[FileEntry, ...]) -> None:
        """Take over the files that another process has sealed for the same checkpoint (`sealed`).

        Raises:
            ConfigError: a path lies outside of the target, or exists already.
            OSError: a file is missing, or the disk refused.
        """
        for entry in entries:
            path = self._temp_path(entry.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._disk.rename(folder.joinpath(*self._inside(entry.path)), path)
            self._adopted[entry.path] = entry
        with contextlib.suppress(OSError):
            self._disk.remove(folder)

    def take(self, folder: Path, files: Mapping[str, Path]) -> None:
        """Make the files that this process has written below `folder` by other means durable, and take them over.

        Args:
            files: path relative to the target's parent, as in the manifest -> where the file is now.

        Raises:
            ConfigError, OSError: as `adopt`.
        """
        entries = tuple(read_files(files, sha256=self._sha256))
        self.adopt(folder, entries)
        self._taken += sum(entry.size for entry in entries)

    def publish(
        self,
        provenance: Provenance,
        *,
        markers: Mapping[str, bytes] | None = None,
        aside: bool = False,
        replace: bool = False,
        present: Collection[str] | None = None,
    ) -> Manifest:
        """Make the checkpoint visible, durably. Seals first. Return the manifest that is now in place.

        It is another one than ours if another process has committed this step before; `kept` then says so.

        Args:
            provenance: what the manifest records.
            markers: files of the framework's own that name the newest checkpoint: path relative to the target's
                parent -> content. Replaced atomically, one by one; not part of the checkpoint.
            aside: whether another checkpoint of that name is moved away (to a hidden name) rather than refused.
            replace: whether what has that name, of whatever step, is removed once the new one has it; for directories.
            present: digests of the manifests that existed when this attempt of the job began. What is not among them,
                and is of the same step and attempt, is kept, because its commit may already have been reported. None:
                not known; any single file is replaced, and a directory of the same step and job kept.

        Raises:
            CheckpointError: already ended, nothing was written, or another checkpoint exists there.
            OSError: the disk refused; an earlier checkpoint is unchanged and verifies.
        """
        if self._ended or not (self._writers or self._adopted):
            raise CheckpointError(
                f"{self.target}: nothing to publish. Open and write a file first; publish once, not after discard."
            )
        self.seal()
        manifest = build(provenance, self._entries())
        with locked(self.target.parent):
            heal(self.target, self._layout, self._disk)
            if replace and os.path.lexists(self.target):
                standing = None
                self._replace(manifest, markers or {})
            elif (standing := self._standing(manifest, aside, present)) is None:
                self._put_in_place(manifest, markers or {})
            else:  # its writer may have died before writing them
                self._mark(markers or {})
        self._ended, self.kept = standing is None, "" if standing is None else _kept(self.target.name, standing)
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

    def _put_in_place(self, manifest: Manifest, markers: Mapping[str, bytes]) -> None:
        path = self._layout.manifest_path(self.target)
        write_atomically(next_path(path), encode(manifest), self._disk)
        if self._scattered:
            self._scatter(manifest)
        else:
            self._say_replaced(read(path), manifest)
            replace_durably(self._temp, self.target, self._disk)
        self._mark(markers)
        replace_durably(next_path(path), path, self._disk)

    def _replace(self, manifest: Manifest, markers: Mapping[str, bytes]) -> None:
        """Put the new directory in place of the old one, which is removed at the end."""
        path = self._layout.manifest_path(self.target)
        write_atomically(next_path(path), encode(manifest), self._disk)
        if self._disk.exchange(self._temp, self.target):
            self._disk.sync_dir(self.target.parent)
            old = [self._temp]
        else:
            home = set_aside(self.target, self._layout, self._disk, tell=False)
            replace_durably(self._temp, self.target, self._disk)
            old = [home, manifest_aside(home)]
        self._mark(markers)
        replace_durably(next_path(path), path, self._disk)
        for left in old:
            with contextlib.suppress(OSError):
                self._disk.remove(left)

    def _say_replaced(self, found: Manifest | ManifestProblem, ours: Manifest) -> None:
        """Warn that this job replaces what another job has saved, if that one had come further: a training that goes on
        in a new job replaces its `last.ckpt` by a newer one.
        """
        if isinstance(found, Manifest) and found.job != ours.job and self.target.is_file():
            level = logging.WARNING if found.step > ours.step else logging.DEBUG
            log.log(level, "%s (step %d of job %s) is replaced by this job's step %d", self.target, found.step,
                    found.job, ours.step)  # fmt: skip

    def _mark(self, markers: Mapping[str, bytes]) -> None:
        for relative, content in markers.items():
            write_atomically(self.target.parent / relative, content, self._disk)

    def _scatter(self, manifest: Manifest) -> None:
        """Rename each file to its own place."""
        places = [self.target.parent / entry.path for entry in manifest.files]
        for entry, place in zip(manifest.files, places, strict=True):
            make_directory(place.parent)
            self._disk.rename(self._temp / entry.path, place)
        for folder in sorted({place.parent for place in places}):
            self._disk.sync_dir(folder)
        with contextlib.suppress(OSError):  # the folder contains nothing of the checkpoint any more
            self._disk.remove(self._temp)

    def _standing(self, ours: Manifest, aside: bool, present: Collection[str] | None) -> Manifest | None:
        """The manifest of an existing checkpoint equal to the one to publish; None if the path is free.

        Raises CheckpointError for anything else, or for a file in place of a directory.
        """
        if not self._layout.parts(self.target):
            return None
        if not (self.target.is_dir() or self._temp.is_dir()):
            return None if present is None else self._of_this_attempt(ours, present)
        found = read_pair(self.target, self._layout)
        if isinstance(found, Manifest) and (found.job, found.step) == (ours.job, ours.step):
            older = present is not None and found.self_digest in present
            if not (older or self._lacks(found)):
                return found
        if aside:
            # First announce the commit, by which `put_back` recognises one that is killed from here on.
            write_atomically(next_path(self._layout.manifest_path(self.target)), encode(ours), self._disk)
            set_aside(self.target, self._layout, self._disk)
            return None
        raise CheckpointError(
            f"{self.target} exists and is not step {ours.step} of job {ours.job!r}. A checkpoint of several files "
            "is never overwritten. Save under a name of its own, or move that one away."
        )

    def _of_this_attempt(self, ours: Manifest, present: Collection[str]) -> Manifest | None:
        """The manifest of the single file that another process of this job has committed since it began; or None."""
        found = read_pair(self.target, self._layout)
        if not isinstance(found, Manifest) or found.self_digest in present or self._lacks(found):
            return None
        return found if all(getattr(found, name) == getattr(ours, name) for name in _SAME) else None

    def _lacks(self, found: Manifest) -> bool:
        """Whether names or sizes differ from its manifest."""
        return bool(compare(self.target, self._layout, found)[0])

    def _inside(self, relative: str) -> tuple[str, ...]:
        """The place of a file in the temporary directory."""
        parts = tuple(relative.split("/"))
        return parts if self._scattered else parts[1:]

    def _temp_path(self, relative: str, new: bool = True) -> Path:
        parts = self._inside(relative)
        others = self._writers.keys() | self._adopted.keys()
        mixed = new and relative in others
        if self._scattered:
            belongs = self._layout.owns(self.target, relative)
        else:
            mixed = mixed or any(("/" in other) == (not parts) for other in others)
            belongs = relative.split("/")[0] == self.target.name
        if not belongs or mixed or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(
                "relative",
                relative,
                f"{self.target.name!r} alone, or paths below it, each once; for scattered files those of its layout",
                "Give the path relative to the directory that holds the checkpoint.",
            )
        return self._temp.joinpath(*parts)


def _kept(name: str, standing: Manifest) -> str:
    by = standing.creator
    return (
        f"step {standing.step} had been committed already, by process {by.pid} on {by.host}: {name} is kept as it is, "
        "and this rank's copy was dropped"
    )
