"""The state of one step in memory, between the fault and the first step that is completed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lastgasp.adapter.run import AdapterRun
from lastgasp.checkpoint.manifest import Fit
from lastgasp.gasp.again import Again
from lastgasp.ports import SaveResult, StateSource
from lastgasp.pytorch.gasp_source import GaspSource
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.pytorch.queued import QueuedWork
from lastgasp.replicas import Digests


@dataclass(frozen=True)
class Memory:
    """What a checkpoint file of `step` would hold, and what its file system would tell.

    Attributes:
        checkpoint: with the auxiliary states of all ranks.
        durable: the newest step that is on disk.
        present: the manifests that were there when training began.
        values: what the user's objects keep, for a rank that takes all this from another one (`uservalues.packed`).
    """

    step: int
    checkpoint: dict[str, Any]
    durable: int
    present: frozenset[str] | None
    values: bytes = b""


@dataclass
class Held:
    """What `train` keeps between two calls of the function.

    Attributes:
        again: what was agreed.
        memory: None on a rank that takes it from another one.
        fit: of the session; None in a new process.
        rejoin: makes the run of the next incarnation; None in a new process. It is called with all this.
        alone: saves what is held where that is not possible.
        life: that run, once this rank has joined with what it holds.
        wrapped: the models' DDP wrappers, which must be gone before new ones are made.
        state: what the kept objects are renewed with (`Renewed.renew`).
        users_handler: of SIGTERM.
        between: takes SIGTERM until this rank has joined again; None in a new process.
    """

    again: Again
    memory: Memory | None = None
    fit: Fit | None = None
    rejoin: Callable[[Held], AdapterRun] | None = None
    life: AdapterRun | None = None
    wrapped: list[Any] = field(default_factory=list)
    state: Any = None
    users_handler: Any = None
    between: SigtermBetween | None = None
    alone: Callable[[BaseException], object] | None = None


def bytes_of(modules: Iterable[nn.Module], optimizers: Iterable[Any]) -> int:
    """Bytes of their parameters, buffers and optimizer states."""
    states = (value for o in optimizers for state in o.state.values() for value in state.values())
    tensors = [*(t for module in modules for t in (*module.parameters(), *module.buffers())), *states]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


class RecorderOfMemory:
    """Stands for the recorder of auxiliary state: the state of one step, as it was held."""

    fd = -1

    def __init__(self, step: int, own: bytes | None) -> None:
        self._step, self._own = step, own
        self.queued = QueuedWork(())  # what is held has left the device

    def read(self, step: int) -> bytes | None:
        """As `AuxRecorder.read`."""
        return self._own if step == self._step else None


class FromMemory:
    """A source that has the held step until another one is completed; implements `ports.StateSource`.

    Attributes:
        live: the source of the training that was entered again; None until its session is open.
    """

    def __init__(self, step: int, held: GaspSource) -> None:
        self._step, self._held = step, held
        self.rank = held.rank
        self.live: GaspSource | None = None
        self.present = held.present

    def forget(self) -> None:
        """Another step is complete: let go of the held one, and of the run that held it."""
        self._step = -1
        if self.live is not None:
            self._held = self.live

    def _at(self, step: int) -> GaspSource:
        return self._held if self.live is None or step == self._step else self.live

    @property
    def buffer_fd(self) -> int:
        """The live training's."""
        return -1 if self.live is None else self.live.buffer_fd

    def capture(self, step: int) -> bytes:
        """As the source of that step."""
        return self._at(step).capture(step)

    def values(self, step: int) -> bytes | None:
        """As the source of that step."""
        return self._at(step).values(step)

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """As the source of that step."""
        return self._at(step).save(step, aux, reason)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """As any of them."""
        return self._held.publish(result, parts)

    def discard(self, result: SaveResult) -> None:
        """As any of them."""
        self._held.discard(result)


class HeldTraining:
    """The training while it is entered again; implements `adapter.run.Training`."""

    def __init__(self, source: StateSource) -> None:
        self.source = source

    def digests(self) -> Digests:
        """None: there is no model yet."""
        return {}

    def settle(self, cause: str) -> str:
        """The held step is complete, whatever has raised."""
        return ""

    def before_exit(self) -> None:
        """Nothing is open."""

    def advice(self) -> str:
        """None."""
        return ""
