"""A training whose ranks hold parts of their own, entered again: each begins with its own part of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lastgasp.adapter.run import AdapterRun
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.gasp.again import Again
from lastgasp.pytorch.loop.again_here import AgainHere, TakenAlong, joined, rejoin, save_alone
from lastgasp.pytorch.loop.memory import Held, Memory
from lastgasp.pytorch.loop.renumber import place_after
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.topology import Place


class PartsAgain(AgainHere):
    """As `AgainHere`; what is kept between two entries is the arena, which a dead rank has left as well.

    No copy of the state is made for it, but where the arena holds an older step than the live state. The run's
    attribute `shards` is its `ShardedSource`. A base of a framework's class goes behind this one.
    """

    def __init__(
        self, run: Any, make: Callable[[Place, Any], AdapterRun], writer: ManifestWriter, held: Held | None
    ) -> None:
        once_more = run.life.before_again if held is not None and held.life is not None else None
        super().__init__(run, make, writer, held)
        self._once_more: Callable[[Again], None] | None = once_more

    def keep(self, again: Again) -> None:
        """As in the base; until this run begins with what was held, which some hooks precede, that is kept as it is.

        Raises:
            NotSaveable: as in the base.
        """
        if self._once_more is None or self.run.shards.entering:
            super().keep(again)
        else:
            self.run.life.session.status.cannot_again = str  # which does not keep the model alive
            self._once_more(again)

    def ready(self) -> None:
        """What was held is in this run's arena by now."""
        self._held = None

    def forget(self) -> None:
        """As in the base."""
        self._memory = None
        super().forget()

    def nbytes(self) -> int:
        """Of no copies."""
        return 0

    def changed(self) -> str:
        """Why the arena, or what the framework has, does not do."""
        why: str = self.run.shards.cannot_again()
        return why or super().changed()

    def elastic(self) -> bool:
        """Without the parts of missing ranks nobody can go on."""
        return False

    def beside(self, again: Again, held: Any) -> Memory | None:
        """What is handed to a new process besides the dead one's arena, if anything; held: `ShardedSource.held`."""
        return None

    def before(self) -> Any:
        """What this process has held since the last entry, of `HeldShards`; None in a new one."""
        assert self._held is not None
        return self._held.life.source.inner if self._held.life is not None else None

    def _keep(self, again: Again, between: SigtermBetween) -> None:
        run = self.run
        status = run.life.session.status
        self.before_dump(again.step)
        source = run.shards.held(again.step)
        memory = self.beside(again, source)
        run.life.source.inner, status.cannot_again = source, str  # which do not keep the model alive
        durable = again.step if again.saved else status.durable
        known = TakenAlong((status.recovery, status.fewer), durable, run.life.alike)
        join = partial(joined, self._make, self.reach())
        run.entry.keep(
            Held(
                again,
                memory,
                run.fit,
                rejoin=partial(rejoin, join, place_after(run.place, again), source, known),
                wrapped=self.let_go(again),
                state=self.state(),
                users_handler=run.users_handler,
                between=between,
                alone=partial(save_alone, run.life, source),
            )
        )
