"""Which step, and from where, if shards have arenas: the best that there is, by trying everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lastgasp.gasp.arena_decision import ArenasHeld, arenas_held, decide_with_arenas
from lastgasp.gasp.decision import Decision, GiveUp, NothingToSave, RankView, SavePlan, decide
from lastgasp.gasp.members import Member
from lastgasp.gasp.messages import ArenaRef, Prepared
from lastgasp.topology import ReplicaGroups

Situation = tuple[tuple[RankView, ...], ReplicaGroups, int, ArenasHeld]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to four ranks on two hosts, some dead, some stuck; arenas with any two steps, or none."""
    ranks = list(range(draw(st.integers(1, 4))))
    group = st.lists(st.sampled_from(ranks), min_size=1, max_size=2, unique=True).map(tuple)
    replicas = tuple(draw(st.lists(group, min_size=1, max_size=3)))
    views = []
    for rank in ranks:
        alive = draw(st.booleans())
        holds, writes = alive and draw(st.booleans()), alive and draw(st.booleans())
        step = draw(st.integers(0, 4))
        views.append(
            RankView(
                rank=rank, step=step, holds=holds, faulty=draw(st.booleans()), alive=alive, why="" if holds else "gone",
                writes=holds or writes,
            )
        )  # fmt: skip
    steps = {rank: tuple(draw(st.sets(st.integers(0, 4), max_size=2))) for rank in ranks if draw(st.booleans())}
    hosts = {rank: draw(st.sampled_from("ab")) for rank in ranks}
    return tuple(views), replicas, draw(st.integers(0, 2)), ArenasHeld(steps, hosts)


def sources(situation: Situation, shard: tuple[int, ...], step: int) -> set[tuple[int, int]]:
    """All pairs of who could write that shard of that step, and from which rank's arena (-1: from its own state)."""
    views, _, _, arenas = situation
    by_rank = {view.rank: view for view in views}
    live = {(rank, -1) for rank in shard if by_rank[rank].holds and by_rank[rank].step == step}
    kept = {rank for rank in shard if step in arenas.steps.get(rank, ())}
    near = {(v.rank, rank) for rank in kept for v in views if v.writes and arenas.hosts[rank] == arenas.hosts[v.rank]}
    return live | near


def possible(situation: Situation) -> set[int]:
    return {step for step in range(5) if all(sources(situation, shard, step) for shard in situation[1])}


@given(situations())
def test_the_newest_step_that_can_be_had_is_saved_from_where_it_is(situation: Situation) -> None:
    views, replicas, durable, _ = situation
    plain, found = decide(views, replicas, durable), decide_with_arenas(*situation)
    best = max(possible(situation), default=-1)
    if isinstance(found, NothingToSave):
        return
    if isinstance(found, GiveUp):
        assert best <= durable
        return
    if isinstance(plain, SavePlan) and not plain.lost:  # as without arenas: the dead do not count for the step
        assert found == plain
        return
    assert found.step == best > durable and found.lost >= 0
    owners = found.arenas or (-1,) * len(replicas)
    for shard, saver, owner in zip(replicas, found.savers, owners, strict=True):
        assert (saver, owner) in sources(situation, shard, best)
        fit = [v.rank for v in views if v.rank in shard and v.holds and v.step == best and not v.faulty]
        assert owner < 0 or not fit  # a live rank comes first
        own = next((view for view in views if view.rank == owner), None)
        assert own is None or not own.writes or saver == owner  # nobody else reads what a rank can write itself


@given(situations())
def test_without_arenas_nothing_changes(situation: Situation) -> None:
    views, replicas, durable, arenas = situation
    none = ArenasHeld({}, arenas.hosts)
    assert decide_with_arenas(views, replicas, durable, none) == decide(views, replicas, durable)


def decision_of(
    dead: int, survivors: int, steps: dict[int, tuple[int, ...]], hosts: str = "aa", durable: int = 0
) -> Decision:
    """Rank 0 has survived, rank 1 has not; each holds a shard of its own. Arguments: the steps that they completed."""
    views = (
        RankView(rank=0, step=survivors, holds=True, writes=True),
        RankView(rank=1, step=dead, holds=False, alive=False, why="gone"),
    )
    return decide_with_arenas(views, ((0,), (1,)), durable, ArenasHeld(steps, dict(enumerate(hosts))))


def test_what_is_lost_is_what_all_shards_had_completed() -> None:
    full = decision_of(dead=7, survivors=7, steps={0: (7, 6), 1: (7, 6)})
    assert isinstance(full, SavePlan)
    assert (full.step, full.lost, full.savers, full.arenas) == (7, 0, (0, 0), (-1, 1))
    inside = decision_of(dead=6, survivors=7, steps={0: (7, 6), 1: (6, 5)})
    assert isinstance(inside, SavePlan)
    assert (inside.step, inside.lost, inside.arenas) == (6, 0, (0, 1))
    every_5 = decision_of(dead=9, survivors=9, steps={0: (5, 0), 1: (5, 0)})
    assert isinstance(every_5, SavePlan)
    assert (every_5.step, every_5.lost) == (5, 4)


def test_an_arena_tells_what_its_rank_had_completed() -> None:
    """The last heartbeat of a stopped rank is older than the newest checkpoint."""
    found = decision_of(dead=1, survivors=5, steps={0: (5, 4), 1: (5, 4)}, durable=4)
    assert isinstance(found, SavePlan)
    assert (found.step, found.lost, found.arenas) == (5, 0, (-1, 1))


def test_where_nobody_can_reach_the_arena_it_says_what_is_held() -> None:
    found = decision_of(dead=7, survivors=7, steps={0: (7, 6), 1: (7, 6)}, hosts="ab", durable=4)
    assert isinstance(found, GiveUp)
    assert found.lost == 3 and "arenas hold: rank 0 7, 6; rank 1 7, 6" in found.reason
    assert isinstance(decision_of(dead=4, survivors=4, steps={1: (3,)}, durable=4), NothingToSave)


def test_a_rank_that_answers_says_itself_what_its_arena_holds() -> None:
    class Look:
        awaited = False

        def steps(self) -> dict[int, tuple[int, ...]]:
            return {0: (), 1: (5, 4), 2: (5, 4)}

        def hosts(self) -> dict[int, str]:
            return {0: "a", 1: "a", 2: "a"}

        def reference(self, rank: int) -> ArenaRef:
            return ArenaRef(rank=rank)

    said = Prepared(recovery=1, step=5, durable=0, usable=True, arena=(5, 4))
    members = {0: Member(rank=0, prepared=said), 1: Member(rank=1, prepared=said, gone="died")}
    assert arenas_held(Look(), members, {(2, 5)}).steps == {0: (5, 4), 1: (5, 4), 2: (4,)}
    assert arenas_held(None, members, set()) == ArenasHeld()
