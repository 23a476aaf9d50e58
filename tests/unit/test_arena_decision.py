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
    """Up to four ranks on two hosts, some dead, some stuck; arenas with any two steps, or none; copies elsewhere."""
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
    copies = {
        rank: (draw(st.sampled_from("abc")), tuple(draw(st.sets(st.integers(0, 4), max_size=2))))
        for rank in ranks if draw(st.booleans())
    }  # fmt: skip
    return tuple(views), replicas, draw(st.integers(0, 2)), ArenasHeld(steps, hosts, copies)


def sources(situation: Situation, shard: tuple[int, ...], step: int) -> set[tuple[int, int, bool]]:
    """Who could write that shard of that step, from which rank's arena (-1: its own state), and whether from a copy."""
    views, _, _, arenas = situation
    by_rank = {view.rank: view for view in views}
    live = {(rank, -1, False) for rank in shard if by_rank[rank].holds and by_rank[rank].step == step}
    kept = {rank for rank in shard if step in arenas.steps.get(rank, ())}
    near = {
        (v.rank, rank, False)
        for rank in kept for v in views if v.writes and arenas.hosts[rank] == arenas.hosts[v.rank]
    }  # fmt: skip
    copied = {rank: arenas.buddies[rank][0] for rank in shard if step in arenas.buddies.get(rank, ("", ()))[1]}
    writers = [view.rank for view in views if view.writes]
    far = {(who, rank, True) for rank, host in copied.items() for who in writers if arenas.hosts[who] == host}
    return live | near | far


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
    newest = max([v.step for v in views if v.alive], default=-1)
    if isinstance(plain, SavePlan) and plain.step == newest:  # as without arenas: the dead do not count for the step
        assert found == plain
        return
    assert found.step == best > durable and found.lost >= 0
    owners = found.arenas or (-1,) * len(replicas)
    for shard, saver, owner in zip(replicas, found.savers, owners, strict=True):
        buddy, all_sources = owner in found.buddies, sources(situation, shard, best)
        assert (saver, owner, buddy) in all_sources
        assert not buddy or not [one for one in all_sources if one[1] >= 0 and not one[2]]  # an arena comes first
        fit = [v.rank for v in views if v.rank in shard and v.holds and v.step == best and not v.faulty]
        assert owner < 0 or not fit  # a live rank comes first
        own = next((view for view in views if view.rank == owner), None)
        assert own is None or not own.writes or saver == owner or buddy  # a rank writes its own


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


def test_an_arena_completes_a_step_of_which_survivors_hold_one_shard_alone() -> None:
    """They have completed the step before together, so that nothing would be lost, but the newer one can be had."""
    views = (
        RankView(rank=0, step=7, holds=False, alive=False, why="gone"),
        *(RankView(rank=rank, step=step, holds=True, writes=True) for rank, step in ((1, 7), (2, 6), (3, 6))),
    )
    replicas = ((0, 2), (1, 3))
    plain = decide(views, replicas, 4)
    assert isinstance(plain, SavePlan) and (plain.step, plain.lost) == (6, 0)
    found = decide_with_arenas(views, replicas, 4, ArenasHeld({0: (7, 6)}, {0: "a", 1: "a"}))
    assert isinstance(found, SavePlan)
    assert (found.step, found.lost, found.savers, found.arenas) == (7, 0, (1, 1), (0, -1))


def test_an_arena_tells_what_its_rank_had_completed() -> None:
    """The last heartbeat of a stopped rank is older than the newest checkpoint."""
    found = decision_of(dead=1, survivors=5, steps={0: (5, 4), 1: (5, 4)}, durable=4)
    assert isinstance(found, SavePlan)
    assert (found.step, found.lost, found.arenas) == (5, 0, (-1, 1))


def test_where_nobody_can_reach_the_arena_it_says_what_is_held() -> None:
    found = decision_of(dead=7, survivors=7, steps={0: (7, 6), 1: (7, 6)}, hosts="ab", durable=4)
    assert isinstance(found, GiveUp)
    assert (found.lost, found.held, found.held_lost) == (3, 7, 0)
    assert "arenas hold: rank 0 7, 6; rank 1 7, 6" in found.reason
    assert isinstance(decision_of(dead=4, survivors=4, steps={1: (3,)}, durable=4), NothingToSave)


def test_a_rank_that_answers_says_itself_what_its_arena_holds() -> None:
    class Look:
        awaited = False

        def steps(self) -> dict[int, tuple[int, ...]]:
            return {0: (), 1: (5, 4), 2: (5, 4)}

        def hosts(self) -> dict[int, str]:
            return {0: "a", 1: "a", 2: "a"}

        def buddies(self) -> dict[int, tuple[str, tuple[int, ...]]]:
            return {1: ("b", (4, 3))}

        def reference(self, rank: int, *, buddy: bool = False) -> ArenaRef:
            return ArenaRef(rank=rank)

    said = Prepared(recovery=1, step=5, durable=0, usable=True, arena=(5, 4))
    members = {
        0: Member(rank=0, prepared=said, begun=True), 1: Member(rank=1, prepared=said, begun=True, gone="died"),
    }  # fmt: skip
    damaged = {(2, 5, False), (1, 4, True)}
    found = arenas_held(Look(), members, damaged)
    assert (found.steps, found.buddies) == ({0: (5, 4), 1: (5, 4), 2: (4,)}, {1: ("b", (3,))})
    assert arenas_held(None, members, set()) == ArenasHeld()


def host_lost(
    survivors: int, arena: tuple[int, ...], copy: tuple[int, ...], durable: int = 0, heard: int = 0
) -> Decision:
    """Rank 1's host is lost, and with it its arena; the host of rank 0 has a copy. `heard`: its last heartbeat."""
    views = (
        RankView(rank=0, step=survivors, holds=True, writes=True),
        RankView(rank=1, step=heard, holds=False, alive=False, why="gone"),
    )
    held = ArenasHeld({0: arena, 1: ()}, {0: "a", 1: "b"}, {1: ("a", copy)})
    return decide_with_arenas(views, ((0,), (1,)), durable, held)


def test_a_lost_hosts_shard_is_taken_from_the_partner() -> None:
    """All then save that older step; what is lost is what the others had completed, for the lost one cannot say."""
    found = host_lost(survivors=17, arena=(17, 16, 15, 10), copy=(15, 10), heard=12)
    assert isinstance(found, SavePlan)
    assert (found.step, found.lost, found.savers) == (15, 2, (0, 0))
    assert (found.arenas, found.buddies) == ((0, 1), frozenset({1}))
    behind = host_lost(survivors=17, arena=(17, 16, 15, 10), copy=(10, 5))
    assert isinstance(behind, SavePlan) and (behind.step, behind.lost) == (10, 7)
    even = host_lost(survivors=15, arena=(15, 14, 10), copy=(15, 10))
    assert isinstance(even, SavePlan) and (even.step, even.lost, even.arenas) == (15, 0, (-1, 1))


def test_a_copy_that_is_too_old_saves_nothing_and_says_so() -> None:
    found = host_lost(survivors=17, arena=(17, 16, 15, 10), copy=(5,), durable=3)
    assert isinstance(found, GiveUp)
    assert found.lost == 14 and "partner hosts hold copies: rank 1 5" in found.reason
    on_disk = host_lost(survivors=17, arena=(17, 16, 15, 10), copy=(10,), durable=12)
    assert isinstance(on_disk, GiveUp) and on_disk.lost == 5
