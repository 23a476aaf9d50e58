"""What a sharded checkpoint has once although several ranks hold it: whether they hold the same, found by comparing.

A checkpoint has one rank's values of each part of each parameter. Several ranks hold a part where it is not sharded,
where their mesh replicates it, and where they have it under the same name on meshes of their own: layers that tensor
parallelism does not split, which are equal, and experts, which are not. Neither names nor placements tell those two
apart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.pytorch.sharded.shared import Kind, Shared
from lastgasp.replicas import needs_comparing

log = logging.getLogger("lastgasp")

_decoder = msgspec.msgpack.Decoder(tuple[dict[bytes, bytes], dict[str, bytes] | None])
_STATES_EVERY = 1024
"""Updates after which states of optimizers are compared again, besides the times at which all is."""
_FIRST = 2
"""Which update is the first at the latest: a framework may report the step at which it resumes as if it were one."""
_SAME_SEED = "Initialise them with the same seed, or shard them with fully_shard."


class SharedParts:
    """Compares them when training begins and after updates: the first, and then ever more rarely, since a warm-up or an
    expert without tokens may leave values equal for a while.

    Args:
        session: of this rank.
        parts: of this rank (`Shards`).
        kept_equal: the user says that ranks which no mesh joins are kept equal all the same.

    Attributes:
        alike: no checkpoint has one rank's values of what another one holds otherwise; the same on all ranks.
    """

    def __init__(self, session: Any, parts: Any, kept_equal: bool) -> None:
        self.alike = True
        self._session, self._parts, self._kept_equal = session, parts, kept_equal
        self._noted = set[Kind | str]()
        self._any, self._last = True, 0
        self._before: int | None = None

    def loaded(self, differed_before: bool) -> None:
        """The state is loaded. All ranks call it together.

        Args:
            differed_before: each rank goes on with its own, which an attempt before has reported.

        Raises:
            ConfigError: ranks hold different values, and all of them would load those of one.
            LastgaspError: as `Session.gather`.
        """
        differing = self._differing("loaded", self._parts.shared(), self._parts.states_of_one())
        if Kind.WHOLE in differing and not differed_before:
            raise ConfigError("model", "parameters that are not sharded differ between ranks", "the same on all ranks",
                              _SAME_SEED)  # fmt: skip
        if Kind.APART in differing and not self._kept_equal and not differed_before:
            raise ConfigError(
                "model", f"{_some(differing[Kind.APART])}: ranks hold different values of the same part on meshes that "
                "nothing joins", "the same on all ranks, or parts of their own",
                "A checkpoint has one of them. Make the dimension of the experts a sharded one of DTensors over all "
                "ranks, or give them names of their own; else initialise them with the same seed.")  # fmt: skip
        self._note(differing)
        self.alike = self._kept_equal or Kind.APART not in differing

    def updated(self, step: int, *, together: bool, describable: bool) -> None:
        """A step is complete.

        Args:
            together: all ranks have completed it and call this. They wait for one another where something is due, so
                what is due follows from the step alone.
            describable: this rank knows what it holds; else it takes part with nothing.
        """
        if self._before is None:
            self._before = step - 1
        updates, last = step - self._before, self._last
        self._last = max(updates, last)
        doubled = updates.bit_length() > last.bit_length()
        if not together or not (doubled or updates // _STATES_EVERY > last // _STATES_EVERY):
            return
        shared = self._parts.shared() if doubled and self._any and describable else []
        shared = [one for one in shared if one.kind is not Kind.REPLICATED or updates <= _FIRST]
        try:
            differing = self._differing(str(step), shared, self._parts.states_of_one() if describable else None)
        except LastgaspError as error:  # a rank has just died, mostly
            log.debug("the ranks could not compare what several of them hold: %s", error)
            return
        if Kind.APART in differing and not self._kept_equal:
            self.alike = False
        self._note(differing)

    def _differing(self, when: str, own: list[Shared], states: dict[str, bytes] | None) -> dict[Kind, list[str]]:
        """Those of which ranks hold different values, with the names of those that this rank has.

        Args:
            states: digests of what one rank writes of the optimizers; None: not known here.
        """
        if needs_comparing(self._session.place.replicas):  # those are compared by all that they hold
            own = [one for one in own if one.kind is not Kind.REPLICATED]
        said = msgspec.msgpack.encode(({one.key: one.digest for one in own}, states))
        found = [_decoder.decode(part) for part in self._session.gather(f"sharded/alike/{when}", said)]
        if when == "loaded":
            self._any = any(parts for parts, _ in found)
        self._note_states([states for _, states in found if states is not None])
        held = dict[bytes, set[bytes]]()
        for parts, _ in found:
            for key, digest in parts.items():
                held.setdefault(key, set()).add(digest)
        other = {key for key, digests in held.items() if len(digests) > 1}
        differing: dict[Kind, list[str]] = {kind: [] for kind in Kind if any(key[0] == kind for key in other)}
        for shared in own:
            if shared.key in other:
                differing[shared.kind] += shared.names
        return differing

    def _note(self, differing: Mapping[Kind, list[str]]) -> None:
        """Each kind once. Ranks that hold none of it say nothing."""
        for kind, names in differing.items():
            if names and kind not in self._noted:
                self._noted.add(kind)
                kept = kind is Kind.APART and self._kept_equal
                self._session.note((_KEPT if kept else _NOTES[kind]).format(_some(names)))

    def _note_states(self, found: list[dict[str, bytes]]) -> None:
        """Optimizers make their state in the first update, or later: not on all ranks in the same one."""
        keys = set().union(*found) - self._noted
        if differing := sorted(key for key in keys if len({one.get(key) for one in found}) > 1):
            self._noted.update(differing)
            self._session.note(f"optimizers hold {', '.join(differing[:4])} as plain tensors or numbers that "
                               "differ between ranks, and a checkpoint has those of one rank: what resumes from it "
                               "is not bit-equal. Keep them as DTensors, like the parameters")  # fmt: skip


_NOTES = {
    Kind.WHOLE: "parameters that are not sharded ({}) differ between ranks once they are trained, as nobody averages "
    "their gradients, and a checkpoint has those of one rank: what resumes from it is not bit-equal. Leave them out of "
    "ignored_params, or average their gradients",
    Kind.REPLICATED: "ranks should hold the same part of the model ({}), as their mesh replicates it, and hold other "
    "values: a checkpoint has those of one rank, and what resumes from it is not bit-equal. Initialise the model with "
    "one seed on all ranks",
    Kind.APART: "ranks hold different values of the same part of {}, on meshes that nothing joins, and a checkpoint "
    "has those of one rank: after a fault a step comes back from memory (arenas) alone, and periodic checkpoints have "
    "this note. Make the dimension of the experts a sharded one of DTensors over all ranks; or say TorchState(..., "
    "replicated=True) if those of one rank will do for all",
}
_KEPT = (
    "ranks hold different values of the same part of {}, although replicated=True says that they are equal: a "
    "checkpoint has those of one rank, and what resumes from it is not bit-equal"
)


def _some(names: list[str]) -> str:
    return (", ".join(names[:4]) + (", ..." if len(names) > 4 else "")) or "layers of other ranks"
