"""What `ModelParallelStrategy` and `FSDPStrategy` write: an atomic commit, a manifest, verified when loaded."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch

from lastgasp.adapter import DamagedCheckpoint, LastgaspError, Undo, number_on_host
from lastgasp.adapter.checkpoint import FileEntry, Staged, has_manifest, read_files, verify
from lastgasp.adapter.files import make_directory, unique_temp
from lastgasp.adapter.sharded import is_hybrid
from lastgasp.adapter.sharded import load as load_parts
from lastgasp.adapter.torch import with_added
from lastgasp_lightning.checkpoint_io import SHARDED, VerifiedCheckpointIO, is_remote, named
from lastgasp_lightning.compat import given_on, replace_method
from lastgasp_lightning.fsdp import is_fsdp, read, saves_files
from lastgasp_lightning.sharded import OWN
from lastgasp_lightning.state import KEY

log = logging.getLogger("lastgasp")


class _Part(msgspec.Struct, frozen=True):
    """What one rank read, or why it could not."""

    entries: list[FileEntry]
    problem: str = ""


_PARTS = msgspec.msgpack.Decoder(_Part)


class ShardedCheckpoints:
    """Replaces the strategy's methods. All ranks call them together, as they call Lightning's.

    Args:
        run: the `LightningRun`; io: what says which step is durable.
    """

    def __init__(self, run: Any, io: VerifiedCheckpointIO) -> None:
        self._run, self._io, self._strategy = run, io, run.trainer.strategy
        self._numbers = itertools.count()

    def install(self) -> Undo:
        """From now on, until the returned undo is called."""
        undo = [
            replace_method(self._strategy, "save_checkpoint", lambda original: self._wrapped(self._save, original)),
            replace_method(self._strategy, "load_checkpoint", lambda original: self._wrapped(self._load, original)),
        ]
        return lambda: [one() for one in undo].clear()

    def _wrapped(self, ours: Any, original: Any) -> Any:
        return lambda *args, **options: ours(original, *args, **options)

    # -- save ---------------------------------------------------------------------------------------------

    def _save(self, save: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's. Where the disk refuses our part of it, or the ranks cannot agree, training goes on; older
        checkpoints remain.
        """
        if self._run.tuning.active or storage_options is not None or is_remote(filepath):
            checkpoint.pop(KEY, None)
            save(checkpoint, filepath, storage_options)
            return
        status, record, step = self._run.session.status, checkpoint.pop(KEY, None), checkpoint.get("global_step", 0)
        if saves_files(self._strategy):  # by the `CheckpointIO` of rank 0
            if record is not None:
                checkpoint[KEY] = record
            status.progress("save")
            try:
                save(checkpoint, filepath, None)
            finally:
                status.progress("data")
            return
        status.progress("save")
        target = Path(self._strategy.broadcast(str(Path(filepath).absolute())))
        temp = Path(self._strategy.broadcast(str(unique_temp(target))))
        try:
            save(checkpoint, temp, None)
            done = self._commit(temp, target, record, step)
        except LastgaspError as error:  # the controller is gone, or a rank came too late: the others find the same
            log.error("checkpoint %s may be missing (%s): training continues; older ones remain", target, error)
            done = False
        finally:
            if self._run.place.rank == 0:
                shutil.rmtree(temp, ignore_errors=True)
            status.progress("data")
        self._io.failed = None if done else target
        if done:
            self._io.saved(target, step, record is not None and record["step"] == step)

    def _commit(self, temp: Path, target: Path, record: dict[str, Any] | None, step: int) -> bool:
        """Each rank reads the file that it has written; rank 0 puts all in place. Returns whether it did."""
        gather, tag = self._run.life.gather_saved, f"lightning/save/{next(self._numbers)}"
        parts = [_PARTS.decode(part) for part in gather(tag, msgspec.msgpack.encode(self._read(temp, target, record)))]
        problem = "; ".join(part.problem for part in parts if part.problem)
        if self._run.place.rank == 0 and not problem:
            try:
                self._publish(temp, target, [entry for part in parts for entry in part.entries], step)
            except OSError as error:
                problem = str(error)
        problem = gather(f"{tag}/done", problem.encode())[0].decode()
        if problem and self._run.place.rank == 0:
            log.error("checkpoint %s could not be written (%s): training continues; older ones remain", target, problem)
        return not problem

    def _read(self, temp: Path, target: Path, record: dict[str, Any] | None) -> _Part:
        rank = self._run.place.rank
        try:
            if rank == 0 and record is not None:
                torch.save(record, temp / OWN)
            own = [path for path in temp.iterdir() if _owner(path.name) == rank]
            files = {f"{target.name}/{path.name}": path for path in own}
            return _Part(read_files(files, sha256=self._run.config.sha256))
        except OSError as error:
            return _Part([], f"rank {rank}: {error}")

    def _publish(self, temp: Path, target: Path, entries: list[FileEntry], step: int) -> None:
        make_directory(target.parent)
        with Staged(target, SHARDED, sha256=self._run.config.sha256) as staged:
            staged.adopt(temp, tuple(entries))
            # last.ckpt, into which Lightning would write: at no moment nothing has that name
            staged.publish(self._run.writer.provenance(step, "periodic", folder=target.parent), replace=True)
        self._io.gone(target)

    # -- load ---------------------------------------------------------------------------------------------

    def _load(self, load: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's, with what a bit-equal resume needs.

        Raises:
            DamagedCheckpoint: it does not match its manifest.
        """
        path, here = Path(checkpoint_path), not is_remote(checkpoint_path)
        if here and path.exists():
            path = named(path, SHARDED)
            self._verify(path)
        loaded: dict[str, Any] = load(checkpoint_path, *given_on(weights_only))
        if path.is_dir() and is_fsdp(self._strategy) and is_hybrid(self._strategy.model):
            # torch's own function takes all ranks for one group of shards, and gives wrong values
            load_parts(path, *self._run.shards.parts(), single_optimizer=False, read=read)
        if here and (path / OWN).is_file():
            # Not weights_only: it is our own file, verified, and holds states of the user's objects.
            loaded[KEY] = torch.load(path / OWN, map_location="cpu", weights_only=False)
        self._io.newest.setdefault(KEY in loaded, path.resolve())
        if here and isinstance(loaded.get(KEY), dict):
            with_added(loaded[KEY], path.absolute(), SHARDED)
        return loaded

    def _verify(self, path: Path) -> None:
        """What the selector has chosen is verified; what the user names is now."""
        if self._run.selector.loading == path or not has_manifest(path, SHARDED):
            return
        gather, tag = self._run.session.gather, f"lightning/load/{next(self._numbers)}"
        share = number_on_host(self._run.place, gather, f"{tag}/hosts")
        verdict = verify(path, SHARDED, share=share)
        said = gather(tag, msgspec.json.encode(verdict.reasons))
        if reasons := [reason for one in said for reason in msgspec.json.decode(one, type=list[str])]:
            raise DamagedCheckpoint(str(path), reasons)


def _owner(name: str) -> int:
    """The rank that reads a file: the one that has written it, as far as its name tells."""
    first = name.removeprefix("__").partition("_")[0]
    return int(first) if name.startswith("__") and first.isdigit() else 0
