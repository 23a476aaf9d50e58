"""Communication marks: what Python calls of torch.distributed, and DDP's gradient buckets, which it does not see.

Off by default. While the bit is off nothing is wrapped. A range is the time from the call to its end on this rank: a
rank that comes last waits for nobody and has the shortest one.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import wrapt
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.processgroups import key_of
from lastgasp.pytorch.ranges import Sink
from lastgasp.steps.bits import COMM

log = logging.getLogger("lastgasp.steps")

_now = time.monotonic_ns

Kind = tuple[str, torch.dtype | None, str]
"""Name of the operation, dtype of what it moves, key of its group."""

_CALLS: dict[str, tuple[str, str]] = {
    "all_reduce": ("HcclAllReduce", "tensor"),
    "all_reduce_coalesced": ("HcclAllReduce", "tensors"),
    "reduce": ("HcclReduce", "tensor"),
    "broadcast": ("HcclBroadcast", "tensor"),
    "all_gather": ("HcclAllGather", "tensor"),
    "all_gather_single": ("HcclAllGather", "input_tensor"),
    "all_gather_into_tensor": ("HcclAllGather", "input_tensor"),
    "all_gather_coalesced": ("HcclAllGather", "input_tensor_list"),
    "gather": ("HcclGather", "tensor"),
    "scatter": ("HcclScatter", "tensor"),
    "reduce_scatter": ("HcclReduceScatter", "output"),
    "reduce_scatter_single": ("HcclReduceScatter", "output"),
    "reduce_scatter_tensor": ("HcclReduceScatter", "output"),
    "all_to_all": ("HcclAlltoAll", "input_tensor_list"),
    "all_to_all_single": ("HcclAlltoAll", "input"),
    "send": ("HcclSend", "tensor"),
    "recv": ("HcclRecv", "tensor"),
    "batch_isend_irecv": ("HcclBatchSendRecv", "p2p_op_list"),
    "barrier": ("HcclBarrier", ""),
}
"""Function of torch.distributed -> its name in HCCL, and the parameter whose elements are counted. Reduce-scatter
counts what each rank receives, all others what each rank gives, as HCCL does. `isend` and `irecv` are left alone:
torch tells them apart by identity, so that a batch of them would be refused."""
_ONE_WAY = {("isend",): "HcclSend", ("irecv",): "HcclRecv"}
"""A batch that only sends, or only receives, is called so: TaskD's reader looks for HcclSend between stages."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bfp16",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""dtype -> its name in HCCL, lower case as in TaskD's samples."""


class CommunicationMarks:
    """Names of communication ranges: JSON text with the keys that TaskD's reader needs (docs/facts/taskd.md §6).

    Args:
        marks: where ranges go.
    """

    def __init__(self, marks: Sink) -> None:
        self._marks = marks
        self._known: dict[Kind, Any] = {}

    @property
    def on(self) -> bool:
        """Whether the bit is on."""
        return bool(self._marks.mask & COMM)

    def put(self, begin_ns: int, end_ns: int, count: int, kind: Kind) -> None:
        """Record a range of so many elements."""
        mark = self._known.get(kind)
        if mark is None:
            mark = self._known[kind] = self._define(*kind)
        self._marks.put(mark, begin_ns, end_ns, count)

    def _define(self, operation: str, dtype: torch.dtype | None, group: str) -> Any:
        kind = _TYPES.get(dtype, str(dtype).removeprefix("torch.")) if dtype is not None else "none"
        name = {"streamId": "0", "count": "{}", "dataType": kind, "groupName": group, "opName": operation}
        text = json.dumps(name, separators=(",", ": "), ensure_ascii=False)
        return self._marks.define(text, domain="communication", bit=COMM, stream=True)


class Collectives:
    """Wraps torch.distributed's Python functions while communication marks are on.

    `look` is called once a step on the training thread; it wraps and unwraps as the switch says. A function that
    somebody imported by name before it was wrapped is called unmarked. What C++ calls (DDP's buckets, functional
    collectives, compiled graphs) does not pass here; for DDP there is `GradientBuckets`.

    Args:
        names: where ranges go.
    """

    def __init__(self, names: CommunicationMarks) -> None:
        self._names = names
        self._undo = ExitStack()
        self._busy = threading.local()
        self._told = self._refused = False
        self.installed = False

    def look(self) -> None:
        """Follow the switch. Where torch does not let itself be wrapped, nothing is, and training continues."""
        if self._names.on == self.installed or self._refused:
            return
        try:
            self._install() if self._names.on else self.close()
        except Exception:
            self._refused = True
            self._tell()
            self.close()

    def _tell(self) -> None:
        """Once: what is only to be marked must not fail for that."""
        if not self._told:
            self._told = True
            log.exception("a collective could not be marked (has torch changed?); training continues without its mark")

    def close(self) -> None:
        """Put every function back; one that somebody else has wrapped meanwhile stays. Idempotent."""
        self._undo.close()
        self.installed = False

    def _install(self) -> None:
        self.installed = True
        for name, (operation, counted) in _CALLS.items():
            original = getattr(distributed_c10d, name, None)
            if original is None:
                continue
            wrapped = wrapt.FunctionWrapper(original, self._around(operation, original, counted))
            for module in (dist, distributed_c10d):
                if vars(module).get(name) is original:
                    setattr(module, name, wrapped)
                    self._undo.callback(_restore, module, name, wrapped, original)

    def _around(self, operation: str, original: Any, counted: str) -> Callable[..., Any]:
        parameters = list(inspect.signature(original).parameters)
        tensor_at, group_at = (parameters.index(p) if p in parameters else 99 for p in (counted, "group"))
        names = self._names

        def measured(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Kind, int] | None:
            group = args[group_at] if group_at < len(args) else options.get("group")
            given = args[tensor_at] if tensor_at < len(args) else options.get(counted)
            try:
                return _kind_of(operation, given, group)
            except Exception:
                self._tell()
                return None

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if not names.on or self._inside() or (found := measured(args, options)) is None:
                return wrapped(*args, **options)
            kind, count = found
            with self._marking():
                begun = _now()
                result = wrapped(*args, **options)
            try:
                _at_end(result, lambda: names.put(begun, _now(), count, kind))
            except Exception:
                self._tell()
            return result

        return call

    def _inside(self) -> bool:
        """Within another marked call of this thread, or where operations are only collected for later."""
        collecting = getattr(getattr(distributed_c10d, "_world", None), "pg_coalesce_state", None)
        return getattr(self._busy, "now", False) or bool(collecting)

    @contextmanager
    def _marking(self) -> Iterator[None]:
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = False


class GradientBuckets:
    """One communication range per step for the gradients of a DistributedDataParallel model.

    DDP reduces its buckets in C++. Its own runtime logging says when the first one began and how long all of them
    took; the reducer, the hook and the numbers stay as they are. While the marks are off, DDP samples as rarely as
    before. On CUDA DDP brings the times with the next forward pass, and waits for its events there.

    Args:
        names: where ranges go.
        model: the wrapped model.
    """

    EVERY, SELDOM = 1, 100
    """Iterations between two samples: while the marks are on, and torch's own default."""

    def __init__(self, names: CommunicationMarks, model: DistributedDataParallel) -> None:
        self._names, self._model = names, model
        trained = [p for p in model.module.parameters() if p.requires_grad]
        self._count = sum(p.numel() for p in trained)
        self._kind = ("HcclAllReduce", trained[0].dtype if trained else None, key_of(model.process_group))
        self._host = all(p.device.type == "cpu" for p in trained)
        self._last = 0
        self._refused = False
        self.sampling = False

    def look(self) -> None:
        """Once a step, after its backward pass, on the training thread: follow the switch, take the times.

        Where DDP does not report them, nothing is marked, and training continues.
        """
        if self._refused:
            return
        try:
            self._follow()
        except Exception:
            self._refused, self.sampling = True, False
            log.exception("DDP's reductions cannot be marked (has torch changed?); training continues without")

    def _follow(self) -> None:
        if self._names.on != self.sampling:
            self._sample(self._names.on)
            self._last = self._times()[0]
        elif self.sampling:
            self._take()

    def close(self) -> None:
        """Let DDP sample as before. Idempotent."""
        if self.sampling:
            self._sample(False)

    def _sample(self, on: bool) -> None:
        self.sampling = on
        self._model._set_ddp_runtime_logging_sample_rate(  # type: ignore[no-untyped-call]
            self.EVERY if on else self.SELDOM
        )

    def _take(self) -> None:
        begun, took = self._times()
        if begun == self._last or took <= 0:
            return  # no reduction since: gradients were only accumulated
        self._last = begun
        monotonic = begun - (time.time_ns() - _now())
        self._names.put(monotonic, monotonic + took, self._count, self._kind)

    def _times(self) -> tuple[int, int]:
        """When the last reduction began (ns since the epoch), and how long it took."""
        if self._host and self.sampling:
            self._model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        data = self._model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return int(data.get("backward_comm_time_start", 0)), int(data.get("backward_comm_time", 0))


def _kind_of(operation: str, given: Any, group: Any) -> tuple[Kind, int]:
    """The kind of a call, and how many elements it moves."""
    if isinstance(given, list) and given and isinstance(given[0], dist.P2POp):
        used = tuple(sorted({one.op.__name__ for one in given}))
        operation, group = _ONE_WAY.get(used, operation), given[0].group
        given = [one.tensor for one in given]
    count, dtype = _measure(given)
    return (operation, dtype, key_of(group if isinstance(group, ProcessGroup) else None)), count


def _measure(given: Any) -> tuple[int, torch.dtype | None]:
    """Elements and dtype of a tensor, or of a (nested) list of tensors."""
    if isinstance(given, torch.Tensor):
        return given.numel(), given.dtype
    if isinstance(given, list | tuple) and given:
        parts = [_measure(part) for part in given]
        return sum(count for count, _ in parts), parts[0][1]
    return 0, None


def _at_end(result: Any, put: Callable[[], None]) -> None:
    """Call `put` when the operation is over: at once, or when its future says so. Where it has none, at once."""
    work = result[-1] if isinstance(result, list) and result else result
    if isinstance(work, dist.Work):
        try:
            work.get_future().add_done_callback(lambda _: put())
            return
        except RuntimeError:  # this backend has no futures for this operation
            pass
    put()


def _restore(module: Any, name: str, ours: Any, original: Any) -> None:
    if vars(module).get(name) is ours:
        setattr(module, name, original)
