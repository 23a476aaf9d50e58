"""A loop whose ranks hold shards of their own, entered again: each begins with its own part of a step, in its arena."""

from __future__ import annotations

from functools import partial
from typing import Any

from lastgasp.gasp.again import Again
from lastgasp.pytorch.loop.again_here import LoopAgain, TakenAlong, joined, rejoin, save_alone
from lastgasp.pytorch.loop.held_parts import HeldParts
from lastgasp.pytorch.loop.memory import Held
from lastgasp.pytorch.loop.ranks import connect
from lastgasp.pytorch.loop.renumber import place_after
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween


class ShardsAgain(LoopAgain):
    """As `LoopAgain`; what is kept between two entries is the arena, which a dead rank has left as well.

    No copy of the state is made for it, but where the arena holds an older step than the live state.
    """

    def fill(self) -> bool:
        """As in the base."""
        held = self._held
        if held is None:
            return False
        before: Any = held.life.source.inner if held.life is not None else None
        assert before is None or isinstance(before, HeldParts)
        self.run.shards.enter(held.again, before)
        return True

    def ready(self) -> None:
        """What was held is in this run's arena by now."""
        self._held = None

    def nbytes(self) -> int:
        """Of no copies."""
        return 0

    def changed(self) -> str:
        """Why the arena does not do."""
        why: str = self.run.shards.cannot_again()
        return why

    def elastic(self) -> bool:
        """Without the parts of missing ranks nobody can go on."""
        return False

    def _keep(self, again: Again, between: SigtermBetween) -> None:
        run = self.run
        status = run.life.session.status
        source = run.shards.held(again.step)
        run.life.source.inner, status.cannot_again = source, str  # which do not keep the model alive
        known = TakenAlong((status.recovery, status.elastic), run.users_handler, run.life.alike, between)
        join = partial(joined, self._make, connect)
        durable = again.step if again.saved else status.durable
        run.entry.keep(
            Held(
                again,
                fit=run.fit,
                rejoin=partial(rejoin, join, place_after(run.place, again), (again.step, durable), source, known),
                wrapped=self.let_go(),
                state=self.state(),
                users_handler=run.users_handler,
                between=between,
                alone=partial(save_alone, run.life, source),
            )
        )
