"""Marks by mstx (of torch_npu or MindSpore), which MindCluster's profiler collects.

Same names and the same switch as the embedded engine's marks (`lastgasp.steps.marks.Marks`). Written to disk by TaskD,
not here: `put`, which records a range that is over, has no counterpart in mstx. What the framework itself marks by mstx
is left to it, or TaskD would see it twice. Sources: docs/facts/mindformers.md §6, docs/facts/taskd.md §6.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lastgasp._fs import make_directory, write_atomically
from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.steps import bits
from lastgasp.steps.attach import NoMark, no_mark
from lastgasp.steps.groups import GROUPS_FILE, groups_text
from lastgasp.steps.marks import HOST_ONLY
from lastgasp.steps.places import MINDCLUSTER, task_id
from lastgasp.steps.settings import MarksConfig

log = logging.getLogger("lastgasp")

LIBRARY = "libmspti.so"
LONGEST = 500
"""Bytes of a name; a row of the profiler's has 999 in all (docs/facts/taskd.md §6)."""
_DOMAIN = "default"
LEFT_TO_TASKD = bits.COMM | bits.DATALOADER | bits.SAVE
"""What torch_npu and MindSpore mark by themselves (docs/facts/taskd.md §6): no switch of lastgasp's reaches it."""


class Mstx(Protocol):
    """`torch_npu.npu.mstx`, `mindspore.profiler.mstx`: a range begins and is ended by its id; 0 is not a range."""

    def range_start(self, message: str, stream: Any = None, **more: Any) -> int:
        """Begin."""

    def range_end(self, range_id: int, **more: Any) -> None:
        """End."""


class MstxMark:
    """A named range. Each thread ends its own begin; ranges of one name may nest.

    Args:
        marks: whose switch is asked; text: the message, a `{}` in it stands for `value`.
        stream: gives the stream on which the device's side of the range is timed; None for ranges of the host alone.
    """

    def __init__(self, marks: MstxMarks, text: str, domain: str, bit: int, stream: Callable[[], Any] | None) -> None:
        self._marks, self._text, self.bit, self.name, self._stream = marks, _told(text), bit, 0, stream
        self._more = {} if domain == _DOMAIN else {"domain": domain}
        self._open = threading.local()
        self._numbered = "{}" in text
        self.value = 0

    def begin(self) -> None:
        """As entering a `with`."""
        stack = self._stack()
        if not self._marks.mask & self.bit:
            stack.append(0)
            return
        text = self._text.replace("{}", str(self.value)) if self._numbered else self._text
        stream = self._stream() if self._stream is not None else None
        stack.append(self._marks.api.range_start(text, stream, **self._more))

    def end(self) -> None:
        """As leaving the `with`; without a begin it does nothing."""
        stack = self._stack()
        if stack and (found := stack.pop()):
            self._marks.api.range_end(found, **self._more)

    def cancel(self) -> bool:
        """End this thread's innermost range, as mstx cannot discard it. Return False if there is none."""
        if not self._stack():
            return False
        self.end()
        return True

    def put(self, begin: int, end: int, value: int, device_begin: int, device_end: int, /) -> bool:
        """Always False: mstx accepts no times."""
        return False

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def _stack(self) -> list[int]:
        try:
            found: list[int] = self._open.stack
        except AttributeError:
            found = self._open.stack = []
        return found


def _told(text: str) -> str:
    """The name as accepted by the profiler's C side, which silently drops others: escaped as JSON, and not too long."""
    text = text[:LONGEST].encode(errors="backslashreplace").decode()
    while len((escaped := json.dumps(text, ensure_ascii=False)[1:-1]).encode()) > LONGEST:
        text = text[:-1]
    return escaped


class MstxMarks:
    """The marks of this process, as mstx ranges.

    Args:
        api: where ranges are begun and ended; current_stream: the stream of the calling thread.
        mask: what is on (`bits`).

    Attributes:
        path: None, there is no ring.
        live: ranges are recorded as they happen, and cannot be added afterwards.
    """

    path = None
    live = True

    def __init__(self, api: Mstx, current_stream: Callable[[], Any], mask: int = bits.DEFAULT_ON) -> None:
        self.api, self._current_stream = api, current_stream
        self._mask = _checked(mask)
        self._lock = threading.Lock()
        self._defined: dict[tuple[str, str, int, bool], MstxMark] = {}
        self._by_name: dict[str, MstxMark | NoMark] = {}
        self._step = self.define("step {}", bit=bits.STEP, stream=True)

    def mark(self, name: str) -> MstxMark | NoMark:
        """The mark of that name in the domain `default`, always the same object."""
        found = self._by_name.get(name)
        if found is None:
            found = self.define(name, bit=bits.BIT_OF_MARK.get(name, bits.STEP), stream=name not in HOST_ONLY)
            self._by_name[name] = found
        return found

    def define(self, text: str, *, domain: str = _DOMAIN, bit: int, stream: bool) -> MstxMark | NoMark:
        """The mark of that name and kind, always the same object; see `Marks.define`."""
        if domain == "communication" or text in HOST_ONLY:
            return no_mark(text)
        key = (text, domain, bit, stream)
        with self._lock:
            if key not in self._defined:
                self._defined[key] = MstxMark(self, text, domain, bit, self._current_stream if stream else None)
            return self._defined[key]

    def put(self, mark: Any, begin_ns: int, end_ns: int, value: int = 0, device: tuple[int, int] = (0, 0)) -> bool:
        """Always False: mstx accepts no times."""
        return False

    def step(self, number: int) -> None:
        """End the open step range and begin that of step `number`."""
        self._step.end()
        self._step.value = number
        self._step.begin()

    def step_begin(self, number: int) -> None:
        """Begin the range of step `number`, after ending one left open by an exception."""
        self._step.cancel()
        self._step.value = number
        self._step.begin()

    def step_end(self) -> None:
        """End the open step range."""
        self._step.end()

    @property
    def mask(self) -> int:
        """What is on (`bits`); setting it is the switch.

        Raises:
            ConfigError: set to what is not a set of bits.
        """
        return self._mask

    @mask.setter
    def mask(self, value: int) -> None:
        self._mask = _checked(value)

    def switch(self, on: int, off: int) -> int:
        """Turn marks on and off (`bits`), leaving all others as they are; from any thread.

        Returns:
            What is on now, of what is switched here.

        Raises:
            ConfigError: a kind that the framework marks by itself and TaskD switches; nothing is changed.
        """
        if theirs := (_checked(on) | _checked(off)) & LEFT_TO_TASKD:
            remedy = "Use `lastgasp job switch-configmap ... | kubectl apply -f -`, or ClusterD's interface."
            allowed = "step or forward: on Ascend the framework marks the others by itself, and TaskD switches them"
            raise ConfigError("switch", bits.describe(theirs), allowed, remedy)
        with self._lock:
            self._mask = (self._mask & ~off) | on
            return self._mask & ~LEFT_TO_TASKD


def _checked(mask: int) -> int:
    if isinstance(mask, bool) or not isinstance(mask, int) or mask & ~bits.ALL or mask < 0:
        raise ConfigError("mask", mask, f"bits out of {bits.ALL}", "See lastgasp.steps.bits.")
    return mask


def torch_mstx() -> tuple[Mstx, Callable[[], Any]]:
    """mstx of torch_npu, and the current stream.

    Raises:
        MissingExtra: torch_npu is not installed, or has no mstx.
    """
    try:
        npu = importlib.import_module("torch_npu").npu
        return npu.mstx, npu.current_stream
    except (ImportError, AttributeError) as error:
        raise MissingExtra("torch_npu with npu.mstx", "megatron") from error


def mindspore_mstx() -> tuple[Mstx, Callable[[], Any]]:
    """mstx of MindSpore, and the current stream.

    Raises:
        MissingExtra: MindSpore is not installed, or has no mstx.
    """
    try:
        mstx = importlib.import_module("mindspore.profiler").mstx
        runtime = importlib.import_module("mindspore.runtime")
        return mstx, runtime.current_stream
    except (ImportError, AttributeError) as error:
        raise MissingExtra("mindspore with profiler.mstx", "mindformers") from error


def is_collected(env: Mapping[str, str] | None = None, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether the ranges of this process are collected: the profiler's library is loaded in it.

    LD_PRELOAD is asked only where that cannot be seen: it may name a library that is not there, or have been set after
    the start.
    """
    try:
        return LIBRARY in maps.read_text(errors="replace")
    except OSError:
        return LIBRARY in (os.environ if env is None else env).get("LD_PRELOAD", "")


class MstxRecorder:
    """What a Session holds of the marks (`steps.attach.Recorder`) where TaskD writes the files.

    Args:
        marks: what training marks with; directory: the rank's, for parallel_group.json.
    """

    def __init__(self, marks: MstxMarks, directory: Path) -> None:
        self.marks, self.directory = marks, directory

    def set_groups(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Report the process groups, for parallel_group.json, which TaskD's slow-node tool needs."""
        try:
            make_directory(self.directory)
            write_atomically(self.directory / GROUPS_FILE, groups_text(groups))
        except OSError as error:
            log.warning("%s was not written to %s: %s", GROUPS_FILE, self.directory, error)

    def set_device_rows(self, source: str) -> None:
        """Nothing: the profiler's are the device's own."""

    def flush(self, timeout: float) -> bool:
        """Do nothing: nothing is buffered here."""
        return True

    def close(self, timeout: float = 0.0) -> bool:
        """The marks are off."""
        self.marks.mask = 0
        return True


def open_marks(framework: str, mask: int | None) -> MstxMarks | None:
    """Return the marks of this rank by mstx; None, with a log line, if they would not be collected.

    Args:
        framework: "pt" or "ms"; mask: what is on, None for nothing at all.

    Raises:
        MissingExtra: the framework has no mstx.
    """
    if mask is None:
        return None
    if not is_collected():
        log.warning(
            "steps are marked by lastgasp's own engine: %s is not preloaded, so nobody collects mstx ranges. Start the "
            "job with `lastgasp run`, or export LD_PRELOAD before the processes start",
            LIBRARY,
        )
        return None
    api, stream = torch_mstx() if framework == "pt" else mindspore_mstx()
    return MstxMarks(api, stream, mask)


def open_recorder(framework: str, config: MarksConfig, rank: int) -> MstxRecorder | None:
    """Return a Session's recorder by mstx; None, with a log line, if ranges would not be collected.

    Raises:
        MissingExtra: the framework has no mstx.
    """
    marks = open_marks(framework, config.mask)
    if marks is None:
        return None
    base = Path(os.environ.get("GROUP_BASE_DIR") or MINDCLUSTER / "profiling")
    return MstxRecorder(marks, base / task_id(0) / str(rank))
