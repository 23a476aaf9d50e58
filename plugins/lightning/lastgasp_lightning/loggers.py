"""Loggers over a restart: the same version continues after what was logged at the boundary that is resumed from."""

from __future__ import annotations

import copy
import json
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lastgasp.adapter import Gather
from lastgasp_lightning.boundary import before_calls
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.csvrows import count_rows, keep_rows
from lastgasp_lightning.eventfiles import cut_events, files_of, holds_nothing, writer_of
from lastgasp_lightning.logversions import Owner, is_automatic, read_owner, write_owner

log = logging.getLogger("lastgasp")

_MOMENT = struct.Struct("<d")
_ANYTHING_OF_THE_USERS = Exception  # a logger is the user's, and its failure must cost the continuation alone


class LogRecord:
    """The loggers of one fit that choose their own versions; others are not touched.

    Order: `install` in `on_fit_start`, `own` when training begins, `mark` at each boundary. In a resume `hold` before
    callbacks get their states, `go_on` when the checkpoint is loaded, on all ranks; where the user has named the
    checkpoint `hush`, at its boundary.

    Args:
        trainer: of this fit; directory: where its checkpoints are.
    """

    def __init__(self, trainer: Any, directory: Path, fit: Callable[[], int]) -> None:
        self._trainer, self._directory, self._fit = trainer, directory, fit
        self._logs: list[_Log] = []
        self._key: list[Any] = []
        self._static, self._timed = b"", False
        self._undo: list[Undo] = []
        self._saved: list[dict[str, Any]] = []
        self._held: list[tuple[Any, dict[str, Any]]] = []

    # -- while it trains --------------------------------------------------------------------------

    def install(self) -> None:
        """Count what is logged, if this rank logs."""
        if not self._trainer.is_global_zero:
            return
        for number, logger in enumerate(self._trainer.loggers):
            try:
                if (found := _log_of(number, logger)) is not None:
                    self._undo.append(found.install())
                    self._logs.append(found)
            except _ANYTHING_OF_THE_USERS as error:
                log.warning("a restart will log in a new version of %s: %s", _name(logger), error)
        self._timed = any(isinstance(one, _EventLog) for one in self._logs)

    def own(self) -> None:
        """Write into each version's directory which fit it belongs to; without that a restart does not touch it."""
        for one in self._logs:
            try:
                known = read_owner(one.folder)
                writers = known.writers if known is not None and known.directory == str(self._directory) else ()
                fresh = tuple(writer for writer in one.writers() if writer not in writers)
                one.folder.mkdir(parents=True, exist_ok=True)
                write_owner(
                    one.folder, Owner(directory=str(self._directory), fit=self._fit(), writers=(*writers, *fresh))
                )
            except (OSError, ValueError) as error:
                log.warning("a restart will log in a new version, as %s cannot be marked: %s", one.folder, error)

    def mark(self) -> bytes:
        """What has been logged so far; empty if this rank logs nothing that can be continued."""
        if not self._logs:
            return b""
        key = [one.position() for one in self._logs]
        if key != self._key:
            self._key = key
            self._static = _MOMENT.pack(0.0) + json.dumps([one.describe() for one in self._logs], default=str).encode()
        if self._timed:
            return _MOMENT.pack(time.time()) + self._static[_MOMENT.size :]
        return self._static

    def uninstall(self) -> None:
        """Undo what `install` did. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._logs = []

    # -- in a resume ------------------------------------------------------------------------------

    def hold(self, mark: bytes, checkpoint: dict[str, Any]) -> None:
        """Read what was logged from the checkpoint; withhold ModelCheckpoints' state until they have their folders.

        Args:
            mark: as rank 0 returned it from `mark`.
        """
        self._held = []
        if len(mark) < _MOMENT.size:
            self._saved = []
            self._say_unknown()
            return
        (moment,) = _MOMENT.unpack_from(mark)
        self._saved = [{**one, "moment": moment} for one in json.loads(mark[_MOMENT.size :])]
        states = checkpoint.get("callbacks", {})
        for callback in self._trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                self._held.append((callback, states.pop(callback.state_key)))

    def go_on(self, gather: Gather) -> None:
        """Continue where the checkpoint says; on all ranks. What cannot be continued stays in its new version."""
        saved, self._saved = self._saved, []
        held, self._held = self._held, []
        if not saved:
            return
        before = _checkpoint_folder(self._trainer)
        turned = [(one["logger"], one["version"]) for one in saved if self._trainer.is_global_zero and self._turn(one)]
        answer = json.dumps([turned, before, _checkpoint_folder(self._trainer)]).encode()
        turned, before, now = json.loads(gather("loggers", answer)[0])
        for number, version in turned:
            self._trainer.loggers[number]._version = version
        for callback, state in held:
            if before is not None and callback.dirpath == before:
                callback.dirpath = now
            callback.load_state_dict(copy.deepcopy(state))

    def hush(self, mark: bytes) -> None:
        """Log nothing of what is replayed at the boundary of `mark`: these very loggers have gone on behind it.

        An earlier fit of this process has: a new logger would have chosen a version of its own.
        """
        if len(mark) < _MOMENT.size or not self._trainer.is_global_zero:
            return
        known, fit = json.loads(mark[_MOMENT.size :]), self._trainer.fit_loop
        found = [
            logger for number, logger in enumerate(self._trainer.loggers)
            if is_automatic(logger) and any(
                (one["logger"], one["folder"]) == (number, str(Path(logger.log_dir).absolute())) for one in known
            )
        ]  # fmt: skip
        undo = [replace_method(logger, "log_metrics", lambda _: lambda *given, **options: None) for logger in found]

        def over() -> None:
            while undo:
                undo.pop()()

        undo += [before_calls(fit.epoch_loop, "advance", over)]
        undo += [before_calls(fit, name, over) for name in ("on_advance_start", "on_run_end")]
        self._undo.append(over)

    def _say_unknown(self) -> None:
        if self._trainer.is_global_zero and any(is_automatic(logger) for logger in self._trainer.loggers):
            log.warning("loggers begin a new version: the checkpoint does not say what had been logged")

    def _turn(self, saved: dict[str, Any]) -> bool:
        """Whether this logger logs in the version of `saved` from now on."""
        try:
            logger = self._trainer.loggers[saved["logger"]]
            one = _log_of(saved["logger"], logger)
            if one is None or one.kind != saved["kind"]:
                raise ValueError("the script has another logger there now, or names its version")
            folder = one.of_version(saved["version"])
            if str(folder) != saved["folder"]:
                raise ValueError(f"it was {saved['folder']}, and the script logs in {folder.parent} now")
            owner = read_owner(folder)
            if owner is None or (owner.directory, owner.fit) != (str(self._directory), self._fit()):
                raise ValueError(f"{folder} is not marked as this fit's, or is gone")
            one.turn(saved, owner)
            return True
        except _ANYTHING_OF_THE_USERS as error:
            log.warning("%s is not continued, a new version begins: %s", saved.get("folder"), error)
            return False


class _Log:
    """One logger, in the version that it chose."""

    kind = ""

    def __init__(self, number: int, logger: Any) -> None:
        self.number, self._logger, self._writer = number, logger, logger.experiment
        self.folder = Path(logger.log_dir).absolute()

    def install(self) -> Undo:
        """Count what is written from now on."""
        return lambda: None

    def writers(self) -> tuple[str, ...]:
        """Who writes files of its own."""
        return ()

    def position(self) -> Any:
        """Changes whenever something is logged; None if the time is enough."""

    def describe(self) -> dict[str, Any]:
        """Where it is."""
        return {"kind": self.kind, "logger": self.number, "version": self._logger.version, "folder": str(self.folder)}

    def of_version(self, version: int) -> Path:
        """The directory of another version."""
        current = self._logger._version
        try:
            self._logger._version = version
            return Path(self._logger.log_dir).absolute()
        finally:
            self._logger._version = current

    def turn(self, saved: dict[str, Any], owner: Owner) -> None:
        """Remove what was logged after the boundary, and append to the rest.

        Raises:
            OSError, ValueError: a file cannot be used.
        """
        folder = self.of_version(saved["version"])
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
        self._go_on(folder, saved, owner)
        self._logger._version = saved["version"]

    def _go_on(self, folder: Path, saved: dict[str, Any], owner: Owner) -> None:
        raise NotImplementedError


class _CsvLog(_Log):
    """CSVLogger. Its writer appends to `metrics.csv`, and rewrites it where a column is new."""

    kind, _rows = "csv", 0

    def install(self) -> Undo:
        """Count the rows."""
        self._rows = count_rows(Path(self._writer.metrics_file_path))

        def counting(original: Callable[[], None]) -> Callable[[], None]:
            def save() -> None:
                rows = len(self._writer.metrics)
                original()
                self._rows += rows

            return save

        return replace_method(self._writer, "save", counting)

    def position(self) -> Any:
        """The number of rows in the file, and of those not written yet."""
        return self._rows, len(self._writer.metrics)

    def describe(self) -> dict[str, Any]:
        """Also the number of rows in the file, and the rows not written yet."""
        return super().describe() | {"rows": self._rows, "waiting": list(self._writer.metrics)}

    def _go_on(self, folder: Path, saved: dict[str, Any], owner: Owner) -> None:
        writer, path = self._writer, folder / Path(self._writer.metrics_file_path).name
        if folder == self.folder:  # the fit was entered again in this process
            writer.metrics.clear()
        columns = keep_rows(path, saved["rows"])
        writer.log_dir, writer.metrics_file_path, writer.metrics_keys = str(folder), str(path), columns
        writer.metrics[:0] = saved["waiting"]
        _remove_empty(self.folder)


class _EventLog(_Log):
    """TensorBoardLogger on torch's SummaryWriter. Each attempt writes files of its own; each event has its time."""

    kind = "tensorboard"

    def writers(self) -> tuple[str, ...]:
        """This process."""
        return (writer_of(self._file().name),)

    def _file(self) -> Path:
        return Path(self._writer._get_file_writer().event_writer._file_name)

    def _go_on(self, folder: Path, saved: dict[str, Any], owner: Owner) -> None:
        fresh = self._file()
        self._writer.flush()  # where the fit was entered again in this process
        cut_events(files_of(folder, owner.writers), saved["moment"])
        writer = type(self._writer)(log_dir=str(folder), **self._logger._kwargs)
        self._writer.close()
        vars(self._writer).clear()
        vars(self._writer).update(vars(writer))  # in place: a module may hold a reference
        self._logger._default_hp_metric = False  # it has been logged already
        if holds_nothing(fresh):
            fresh.unlink()
            _remove_empty(self.folder)


def _log_of(number: int, logger: Any) -> _Log | None:
    """None for what cannot be continued, or must not be: the user has named its version."""
    if not isinstance(logger, CSVLogger | TensorBoardLogger) or not is_automatic(logger):
        return None
    if "://" in str(logger.save_dir):
        return None
    if isinstance(logger, CSVLogger):
        return _CsvLog(number, logger)
    if type(logger.experiment).__module__.startswith("torch."):
        return _EventLog(number, logger)
    return None  # tensorboardX, whose file names do not contain the process


def _checkpoint_folder(trainer: Any) -> str | None:
    """Where a ModelCheckpoint without `dirpath` saves."""
    if not trainer.loggers or getattr(trainer.loggers[0], "save_dir", None) is None:
        return None
    first = trainer.loggers[0]
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return os.path.join(first.save_dir, str(first.name), version, "checkpoints")


def _remove_empty(folder: Path) -> None:
    """The directory of the version that this start has opened, if nothing was put into it."""
    try:
        folder.rmdir()
    except OSError:
        pass


def _name(logger: Any) -> str:
    return type(logger).__name__
