"""The protocol: how a rank comes back to where it stood in one loader."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

MAP, STATEFUL, STREAM, ELASTIC = "map", "stateful", "stream", "elastic"
"""How a position is restored, as checkpoints name it: by the sampler, by the loader's state, by drawing again; by what
all ranks have used together."""

DESCRIBED = {
    MAP: "a loader of a map-style data set",
    STATEFUL: "a loader that saves its own position (state_dict)",
    STREAM: "a loader that can only be read again from its beginning (an iterable data set, or accelerate's)",
    ELASTIC: "an ElasticLoader",
}
"""The same for people."""
WORKERS = "random numbers that worker processes of a DataLoader draw are not restored"
CHANGED = (
    "the loader does not give what it gave before: batches of this pass are other ones than those trained on (has the "
    "data set, its seed or its sampler's epoch changed, is its order drawn anew in each process, or does it depend on "
    "the training?)"
)

PREPARED = (
    "the loader has been prepared by accelerate since the checkpoint was saved, or is so no more: which pass it is in, "
    "by which it may shuffle, is not known"
)


def other_ranks(saved: int, now: int, consumed: int) -> str:
    """Why another number of ranks does not get the data that were due in a pass of which each had used `consumed`."""
    how = "left out" if now > saved else "trained twice"
    return (
        f"each rank had used {consumed} batches of this pass and goes on behind as many, but there were {saved} ranks "
        f"and are {now}: where they share the data (DistributedSampler) and batches are as large as before, "
        f"{abs(now - saved) * consumed} batches are {how}. ElasticLoader goes on with the samples that are due"
    )


IN_TURN = (
    "random numbers of the process are drawn for it batch by batch, in turn with the training's own: where its order "
    "depends on them, samples come twice or are left out (give the sampler or the data set a generator of its own)"
)

UNORDERED = (
    "in_order=False: batches come as worker processes finish them, so that it is not known which of them were trained "
    "on, and samples come twice or are left out"
)


class PassStart(msgspec.Struct, kw_only=True):
    """What of a position is known once the first batch of a pass has been drawn, and stays the same to its end.

    Attributes:
        start: of a map-style loader, `SamplerStart`.
        at_iter: random state right before the loader was iterated.
        at_first: random state right before its first batch was drawn.
        generators: states of the loader's own generators right before it was iterated.
        counters: what else the loader needs to begin this pass again, as its adapter encodes it.
        digest: of the first batch; digests: of the others that were drawn and are compared (`is_compared`).
        own: states of random generators that the loader holds, as `OwnGenerators` has them.
    """

    start: dict[str, Any] = {}
    at_iter: bytes = b""
    at_first: bytes = b""
    generators: list[bytes] = []
    counters: bytes = b""
    digest: bytes = b""
    own: bytes = b""
    digests: list[bytes] = []


class LoaderPosition(Protocol):
    """Where one rank stands in one loader, and how it comes back there.

    Every rank has its own, and only the thread that trains calls it. For each pass over the loader:

    1. `begin`, or `resume` for the pass in the middle of which a checkpoint was taken; then the loader is iterated.
    2. `first` right before the first batch is drawn, and `seen` with each batch that is compared. Where `resume`
       returned a number, so many batches are drawn and thrown away first, and those calls are about these, too.
    3. `settle` once a resumed pass is where it was; the next batch that is drawn is the one that was due. Random
       state is then whatever it became: the caller restores that of the boundary itself.
    4. At a boundary `start` and `state` are what a checkpoint needs, with the number of batches consumed.

    Attributes:
        kind: MAP, STATEFUL, STREAM or ELASTIC.
        changed: `start` has changed since the caller set this to False.
        live: there is a `state`: it changes with every batch, and has to be asked for before the next one is drawn.
            That of the end of a pass says where the next one begins (the epoch that the loader counts).
        inexact: why a resume in the middle of a pass is not exact, for people; empty where nothing is known against it.
            It may become known by a resume only.
        start: see `PassStart`.
    """

    kind: str
    changed: bool

    @property
    def live(self) -> bool:
        """See above."""

    @property
    def inexact(self) -> str:
        """See above."""

    @property
    def start(self) -> PassStart:
        """See above."""

    def begin(self) -> None:
        """A pass begins."""

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """A pass is continued after `consumed` batches.

        Args:
            start: as recorded; empty where nothing is known but the number.
            state: as recorded; empty where nothing is known, or where this kind of loader has none.
            over: the pass had ended; the loader is iterated next when another pass begins.

        Returns:
            How many batches must be drawn and thrown away; None where the pass has nothing left, and the loader must
            not be asked for a batch.
        """

    def first(self) -> None:
        """The first batch of the iteration is about to be drawn."""

    def seen(self, batch: Any, number: int) -> None:
        """A batch as the loader gave it.

        Args:
            number: in its pass, from 1; one of those of `is_compared`.
        """

    def settle(self, in_turn: bool = False) -> None:
        """Stand where the resumed pass stood.

        Args:
            in_turn: what was thrown away has drawn random numbers of the process batch by batch.
        """

    def state(self) -> bytes:
        """What changes with every batch, encoded at once; empty where nothing does."""
