"""The controller's mind under any sequence of events: what it may never do, and that it always comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action, Kill, RecordPhase, Send
from lastgasp.gasp.machine import GO_ON_TRIES, MARGIN, Machine
from lastgasp.gasp.progress import Progress
from lastgasp.gasp.views import SAVE_TRIES
from lastgasp.topology import ReplicaGroups, data_parallel

FINISH, SAVE, HANG = 5.0, 50.0, 20.0
ORDER = ("running", "preparing", "saving", "committing", "over")
Event = tuple[Any, ...]


class Referee:
    """Feeds a machine and checks every action that it takes."""

    def __init__(self, replicas: ReplicaGroups, world: int) -> None:
        progress = Progress(limit=HANG)
        self.machine = Machine(
            replicas=replicas, world_size=world, finish_timeout=FINISH, save_timeout=SAVE, progress=progress
        )
        self.world, self.now, self.tick_count = world, 0.0, 0
        self.lives: dict[int, int] = {}
        self.released: list[tuple[int, int]] = []
        self.discarded: set[tuple[int, int]] = set()
        self.saves: dict[int, dict[int, m.Save]] = {}
        self.commits: dict[int, int] = {}
        self.saved: set[tuple[int, int]] = set()
        self.notes: list[str] = []
        self.killed: list[int] = []
        self.targets: list[tuple[int, int]] = []

    # -- events -----------------------------------------------------------------------------------

    def join(self, rank: int) -> None:
        """As the controller lets it in: not where one is here already."""
        member = self.machine.members.get(rank)
        if member is None or not member.here:
            self.lives[rank] = self.lives.get(rank, 0) + 1
            self.judge(lambda: self.machine.joined(rank, self.now))

    def die(self, rank: int, kind: FaultKind = "killed") -> None:
        """Its process or its connection ended."""
        self.judge(lambda: self.machine.gone(rank, "process died", kind, 1, self.now))

    def say(self, rank: int, message: m.FromRank) -> None:
        """Any rank may say anything at any time."""
        if isinstance(message, m.Saved) and (message.recovery, message.plan) == self.plan:
            self.saved.add((message.plan, rank))
        self.judge(lambda: self.machine.said(rank, message, self.now))

    def wait(self, seconds: float, stopped: frozenset[int] = frozenset()) -> None:
        """Time goes by, with a look at the deadlines every second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            self.judge(lambda: self.machine.tick(self.now, 1, stopped))

    @property
    def plan(self) -> tuple[int, int]:
        """The plan that is alive."""
        return self.machine.recovery, self.machine.plan

    # -- laws -------------------------------------------------------------------------------------

    def judge(self, event: Callable[[], list[Action]]) -> None:
        """Let it happen; every action must be allowed, and time must not run backward."""
        before = self.place()
        for action in event():
            self.check(action)
        after = self.place()
        assert after >= before, f"{before} -> {after}"
        assert self.machine.recovery <= 1, "one recovery for one generation"

    def place(self) -> tuple[bool, int, int]:
        """How far the machine is; a new plan is further than anything that an older one reached."""
        state = self.machine.state
        return state == "over", self.machine.plan, ORDER.index(state)

    def check(self, action: Action) -> None:
        """One action."""
        if isinstance(action, RecordPhase):
            self.notes.append(action.phase)
        elif isinstance(action, Kill):
            member = self.machine.members[action.rank]
            assert not member.gone and not member.left
            assert self.machine.state == "over"
            self.killed.append(action.rank)
        elif isinstance(action, Send):
            assert self.machine.members[action.rank].here, f"an order for rank {action.rank}, which is not here"
            self.check_order(action.rank, action.message)

    def check_order(self, rank: int, order: m.Message) -> None:
        """One order to a rank that is here."""
        if isinstance(order, m.Save):
            self.check_save(rank, order)
        elif isinstance(order, m.Commit):
            self.check_commit(rank, order)
        elif isinstance(order, m.Discard):
            self.discarded.add((order.plan, rank))
        elif isinstance(order, m.Release):
            life = (rank, self.lives.get(rank, 0))
            assert life not in self.released, "released twice"
            self.released.append(life)
        else:
            assert isinstance(order, m.Prepare) and order.faults
            self.targets.append((rank, order.target))

    def check_save(self, rank: int, order: m.Save) -> None:
        """Whoever saves is well, holds that very step, and no older plan is alive."""
        member = self.machine.members[rank]
        assert not (member.gone or member.hung or member.left)
        assert member.prepared is not None and member.prepared.usable and member.prepared.step == order.step
        assert member.failures < SAVE_TRIES
        assert (order.recovery, order.plan) == self.plan
        orders = self.saves.setdefault(order.plan, {})
        assert rank not in orders
        orders[rank] = order
        assert len({o.step for o in orders.values()}) == 1
        for plan, ranks in self.saves.items():
            for other in ranks if plan < order.plan else ():
                here = self.machine.members[other].here
                assert (plan, other) in self.discarded or not here or self.lives[other] > 1, "two plans alive"

    def check_commit(self, rank: int, order: m.Commit) -> None:
        """Once per plan, to one of its savers, after all of them have said that they saved."""
        assert order.plan not in self.commits
        assert order.plan == self.machine.plan
        self.commits[order.plan] = rank
        savers = set(self.saves[order.plan])
        assert rank in savers == set(order.parts)
        assert {(order.plan, saver) for saver in savers} <= self.saved

    def check_end(self) -> None:
        """A fault is always answered: over in bounded time, everybody here released, the record complete."""
        for _ in range(4 * self.world * SAVE_TRIES + 4):
            self.wait(max(FINISH + MARGIN, SAVE) + 1)
        if not self.machine.faults:
            assert self.machine.state == "running"
            return
        machine, out = self.machine, self.machine.outcome
        assert machine.state == "over"
        here = {(r, self.lives[r]) for r, member in machine.members.items() if member.here}
        assert here <= set(self.released)
        assert self.notes[0] == "detected" and self.notes.count("released") == 1
        assert out.ending in ("saved", "nothing_to_save", "gave_up")
        assert (out.ending == "saved") == ("committed" in self.notes)
        assert out.ending != "gave_up" or out.reason
        if out.ending == "saved":
            assert out.step is not None and machine.plan in self.commits


FINISHED = "had finished training and let go of its state; a checkpoint at its end would have the last step"
RANKS = st.integers(0, 3)
NEAR = st.sampled_from([0, 0, 0, 0, -1, 1])
STEPS = st.integers(0, 3)
KINDS: st.SearchStrategy[FaultKind] = st.sampled_from(["exception", "sigterm", "peer", "killed", "exit"])
EVENTS = st.one_of(
    st.tuples(st.just("join"), RANKS),
    st.tuples(st.just("die"), RANKS),
    st.tuples(st.just("begin"), RANKS, STEPS, st.integers(0, 1)),
    st.tuples(st.just("status"), RANKS, STEPS, st.integers(0, 1)),
    st.tuples(st.just("report"), RANKS, KINDS),
    st.tuples(st.just("entered"), RANKS, NEAR, STEPS),
    st.tuples(st.just("prepared"), RANKS, NEAR, STEPS, st.booleans(), NEAR),
    st.tuples(st.just("obey"), RANKS),
    st.tuples(st.just("saved"), RANKS, NEAR, NEAR),
    st.tuples(st.just("failed"), RANKS, NEAR, NEAR),
    st.tuples(st.just("committed"), RANKS, NEAR, NEAR),
    st.tuples(st.just("goodbye"), RANKS),
    st.tuples(st.just("foreign"), RANKS),
    st.tuples(st.just("wait"), st.sampled_from([0.5, FINISH, SAVE]), st.frozensets(RANKS, max_size=2)),
)
REPLICAS = st.sampled_from([data_parallel(4), ((0, 2), (1, 3)), ((0, 1), (2,), (3, 0)), ((0,), (1,), (2,), (3,))])
PREPARED = [("prepared", rank, 0, 2, True) for rank in range(4)]


def play(referee: Referee, event: Event) -> None:
    """One event of the list."""
    name, *args = event
    if name in ("join", "die"):
        getattr(referee, name)(*args)
    elif name == "wait":
        referee.wait(*args)
    elif name == "obey":
        obey(referee, args[0])
    else:
        referee.say(args[0], message(referee, name, args))


def message(referee: Referee, name: str, args: list[Any]) -> m.FromRank:
    """What the rank says; recovery and plan are those of the machine, plus an offset."""
    recovery, plan = referee.plan
    rank = args[0]
    if name == "begin":
        return m.Begin(step=args[1], durable=args[2], buffer_fd=-1)
    if name == "status":
        referee.tick_count += 1
        return m.Status(step=args[1], durable=args[2], tick=referee.tick_count, phase="backward")
    if name == "report":
        return m.Report(fault=Fault(kind=args[1], rank=rank, cause="boom", step=1, seen_ns=1))
    if name == "prepared":
        why = "" if args[3] else "torn"
        told = {"step": args[2], "target": referee.machine.reach + (args[4] if len(args) > 4 else 0)}
        return m.Prepared(recovery=recovery + args[1], durable=0, usable=args[3], why=why, **told)
    if name == "entered":
        return m.Entered(recovery=recovery + args[1], step=args[2])
    if name == "goodbye":
        return m.Goodbye()
    if name == "foreign":
        return m.GatherPart(tag="x", payload=b"")
    recovery, plan = recovery + args[1], plan + args[2]
    if name == "saved":
        return m.Saved(recovery=recovery, plan=plan, path="p", nbytes=1, first_byte_ns=1)
    if name == "failed":
        return m.SaveFailed(recovery=recovery, plan=plan, why="disk full")
    return m.Committed(recovery=recovery, plan=plan)


def obey(referee: Referee, rank: int) -> None:
    """The rank does what the machine is waiting for, if it is waiting for this rank."""
    names: dict[str, Event] = {
        "preparing": ("prepared", rank, 0, 2, True),
        "saving": ("saved", rank, 0, 0),
        "committing": ("committed", rank, 0, 0),
    }
    if referee.machine.state in names:
        play(referee, names[referee.machine.state])


@settings(max_examples=150, deadline=None)
@given(replicas=REPLICAS, absent=st.integers(0, 4), events=st.lists(EVENTS, max_size=40))
# A rank that was not asked answers, twice, early and late.
@example(replicas=data_parallel(4), absent=0, events=[("die", 3), *PREPARED, ("saved", 2, 0, 0), ("obey", 0)])
@example(
    replicas=data_parallel(4),
    absent=0,
    events=[("die", 3), *PREPARED, ("obey", 0), ("committed", 2, 0, 0), ("obey", 0), ("failed", 0, 0, 0)],
)
# The saver leaves with a Goodbye in the middle of its save.
@example(replicas=data_parallel(4), absent=0, events=[("die", 3), *PREPARED, ("goodbye", 0)])
# A late rank joins while others save.
@example(replicas=data_parallel(4), absent=1, events=[("die", 2), *PREPARED, ("join", 3), *PREPARED, ("die", 0)])
def test_laws_hold_for_any_events(replicas: ReplicaGroups, absent: int, events: list[Event]) -> None:
    referee = Referee(replicas, 4)
    for rank in range(4 - absent):
        referee.join(rank)
    for event in events:
        play(referee, event)
    referee.check_end()


@settings(max_examples=80, deadline=None)
@given(replicas=REPLICAS, victims=st.sets(RANKS, min_size=1), obedient=st.permutations(range(4)))
def test_whoever_can_be_saved_is_saved(replicas: ReplicaGroups, victims: set[int], obedient: list[int]) -> None:
    """Ranks die all at once; the others follow orders, in any order."""
    referee = begun(replicas)
    for rank in sorted(victims):
        referee.die(rank)
    for _ in range(4):
        for rank in obedient:
            obey(referee, rank)
    possible = all(set(group) - victims for group in replicas)
    assert referee.machine.state == "over"
    assert referee.machine.outcome.ending == ("saved" if possible else "gave_up")
    assert referee.machine.outcome.lost == (0 if possible else 2)


def begun(replicas: ReplicaGroups) -> Referee:
    """Four ranks at step 2."""
    referee = Referee(replicas, 4)
    for rank in range(4):
        referee.join(rank)
        play(referee, ("begin", rank, 0, 0))
        play(referee, ("status", rank, 2, 0))
    return referee


def test_a_saver_that_finishes_training_in_the_middle_is_replaced_at_once() -> None:
    referee = begun(data_parallel(4))
    play(referee, ("die", 3))
    for rank in range(3):
        obey(referee, rank)
    assert referee.machine.outcome.savers == (0,)
    play(referee, ("goodbye", 0))
    assert (referee.machine.state, referee.machine.outcome.savers) == ("saving", (1,))
    assert {u.rank: u.why for u in referee.machine.outcome.unused}[0] == FINISHED


def test_a_rank_that_has_finished_training_holds_nothing_and_the_record_says_what_would_have() -> None:
    referee = begun(((0, 1), (2, 3)))
    play(referee, ("goodbye", 1))
    play(referee, ("die", 0))
    for rank in (2, 3):
        obey(referee, rank)
    assert referee.machine.outcome.ending == "gave_up"
    assert FINISHED in referee.machine.outcome.reason


def test_a_hung_rank_is_excluded_and_killed_after_the_save() -> None:
    referee = begun(data_parallel(4))
    for _ in range(int(HANG) + 2):
        referee.wait(1.0, stopped=frozenset({1}))
    assert referee.machine.members[1].hung and referee.machine.state == "preparing"
    play(referee, ("prepared", 1, 0, 3, True))  # it wakes up, ahead of the others, and is not trusted
    for _ in range(3):
        for rank in (0, 2, 3):
            obey(referee, rank)
    assert referee.killed == [1]
    assert referee.machine.outcome.step == 2
    assert [(f.kind, f.rank) for f in referee.machine.faults] == [("hang", 1)]


def test_where_all_ranks_hang_nobody_is_blamed_and_everybody_may_save() -> None:
    referee = begun(data_parallel(4))
    referee.wait(HANG + 2)
    assert not any(member.hung for member in referee.machine.members.values())
    for _ in range(3):
        for rank in range(4):
            obey(referee, rank)
    assert (referee.machine.outcome.ending, referee.killed) == ("saved", [])


def test_a_rank_that_never_began_does_not_make_the_others_guilty() -> None:
    """Ranks 0 to 2 wait in backward for rank 3, which is still in start-up: all of them may save."""
    referee = Referee(data_parallel(4), 4)
    for rank in range(4):
        referee.join(rank)
    for rank in range(3):
        play(referee, ("begin", rank, 0, 0))
        play(referee, ("status", rank, 2, 0))
    referee.wait(HANG + 2)
    assert referee.machine.state == "preparing"
    assert not any(member.hung for member in referee.machine.members.values())


def test_a_rank_whose_control_thread_is_silent_is_waited_for_and_killed() -> None:
    referee = begun(data_parallel(4))
    play(referee, ("die", 3))
    for rank in (1, 2):
        obey(referee, rank)
    assert referee.machine.state == "preparing"
    referee.wait(FINISH + MARGIN)
    assert referee.machine.plan == 1
    for _ in range(2):
        obey(referee, 1)
    assert referee.killed == [0]
    assert {u.rank: u.why for u in referee.machine.outcome.unused}[0] == "did not answer in time"


def test_a_save_that_failed_once_is_tried_again_where_nobody_else_is_left() -> None:
    referee = begun(data_parallel(4))
    for rank in (1, 2, 3):
        play(referee, ("die", rank))
    obey(referee, 0)
    play(referee, ("failed", 0, 0, 0))
    assert (referee.machine.state, referee.machine.outcome.savers) == ("saving", (0,))
    play(referee, ("failed", 0, 0, 0))
    assert referee.machine.outcome.ending == "gave_up"
    assert "its save failed: disk full" in referee.machine.outcome.reason


def test_a_rank_that_comes_late_learns_how_it_ended() -> None:
    referee = begun(data_parallel(4))
    play(referee, ("die", 3))
    for _ in range(3):
        for rank in range(3):
            obey(referee, rank)
    referee.join(3)
    assert (3, 2) in referee.released


def test_leaving_is_no_fault() -> None:
    referee = begun(data_parallel(4))
    for rank in range(4):
        play(referee, ("goodbye", rank))
        play(referee, ("die", rank))
    referee.wait(10 * HANG)
    assert (referee.machine.state, referee.machine.faults) == ("running", [])


def test_a_saver_whose_state_moved_on_saves_its_current_step() -> None:
    """A compiled step cannot be stopped half-way: rank 0 completed step 3 while it was saving step 2."""
    referee = begun(data_parallel(4))
    play(referee, ("die", 3))
    for rank in range(3):
        obey(referee, rank)
    play(referee, ("prepared", 0, 0, 3, True))
    assert referee.machine.state == "preparing"
    assert (1, 0) in referee.discarded
    for rank in (1, 2):
        play(referee, ("prepared", rank, 0, 2, True))
    for _ in range(2):
        obey(referee, 0)
    out = referee.machine.outcome
    assert (out.ending, out.step, out.savers, out.lost) == ("saved", 3, (0,), 0)


def test_shards_that_all_moved_on_meet_at_the_later_step() -> None:
    referee = begun(((0,), (1,), (2,), (3,)))
    play(referee, ("report", 3, "sigterm"))
    for rank in range(4):
        obey(referee, rank)
    play(referee, ("saved", 1, 0, 0))
    for rank in (0, 1, 2, 3):
        play(referee, ("prepared", rank, 0, 3, True))
    assert (referee.machine.state, referee.machine.outcome.step) == ("saving", 3)
    for _ in range(2):
        for rank in range(4):
            obey(referee, rank)
    assert referee.machine.outcome.ending == "saved"


def test_where_all_ranks_run_they_continue_to_the_end_of_the_step_that_one_has_begun() -> None:
    """Rank 1 has stopped before step 3, and rank 0 is in a collective of it: it would wait there for nothing."""
    referee = begun(data_parallel(4))
    play(referee, ("report", 0, "sigterm"))
    for rank in (1, 2):
        play(referee, ("prepared", rank, 0, 2, True))
    play(referee, ("entered", 0, 0, 3))
    play(referee, ("entered", 3, 0, 3))
    play(referee, ("prepared", 1, 0, 2, True, -1))  # said before it heard that
    assert referee.targets == [(rank, target) for target in (-1, 3) for rank in range(4)]
    for rank in (0, 3, 1, 2):
        assert referee.machine.state == "preparing"
        play(referee, ("prepared", rank, 0, 3, True))
    assert (referee.machine.state, referee.machine.outcome.step) == ("saving", 3)


def test_where_all_ranks_run_those_behind_complete_the_step_of_the_others() -> None:
    """Rank 0 had completed it before it was asked; any other would be saved without its own random state."""
    referee = begun(data_parallel(4))
    play(referee, ("report", 0, "sigterm"))
    for rank, step in ((0, 3), (1, 2), (2, 2), (3, 2)):
        play(referee, ("prepared", rank, 0, step, True))
    assert referee.targets[4:] == [(rank, 3) for rank in range(4)]
    for rank in (1, 2, 3):
        assert referee.machine.state == "preparing"
        play(referee, ("prepared", rank, 0, 3, True))
    assert (referee.machine.state, referee.machine.outcome.step) == ("saving", 3)


@pytest.mark.parametrize("event", [("die", 3), ("goodbye", 3), ("report", 3, "exception")])
def test_nobody_continues_where_a_rank_has_stopped(event: Event) -> None:
    referee = begun(data_parallel(4))
    play(referee, ("report", 0, "sigterm"))
    play(referee, event)
    play(referee, ("entered", 0, 0, 3))
    assert {target for _, target in referee.targets} == {-1}


def test_shards_that_stopped_on_two_sides_of_an_update_meet_behind_it() -> None:
    """Rank 3 is dead, ranks 1 and 2 were held before the update that rank 0 made: they have all that it takes."""
    referee = begun(((0,), (1, 3), (2, 3)))
    play(referee, ("die", 3))
    for rank, step in ((0, 3), (1, 2), (2, 2)):
        play(referee, ("prepared", rank, 0, step, True))
    assert referee.targets[3:] == [(0, 3), (1, 3), (2, 3)]
    for rank in (1, 2):
        assert referee.machine.state == "preparing"
        play(referee, ("prepared", rank, 0, 3, True))
    assert (referee.machine.state, referee.machine.outcome.step) == ("saving", 3)


def test_shards_that_do_not_meet_are_asked_a_few_times_more() -> None:
    """Rank 0 cannot follow: its thread has raised, or waits for something else; nobody continues for its sake."""
    referee = begun(((0,), (1,), (2,), (3,)))
    play(referee, ("report", 0, "exception"))
    for step in (3, 3):
        assert referee.machine.state == "preparing"
        for rank in range(4):
            play(referee, ("prepared", rank, 0, step if rank else 2, True))
    assert "not at one common step" in referee.machine.outcome.reason
    assert referee.machine.state == "over"


def test_ranks_that_keep_changing_are_not_waited_for() -> None:
    """They cannot where they are what they say; whoever says so for ever is not believed for ever."""
    referee = begun(((0,), (1,), (2,), (3,)))
    play(referee, ("report", 0, "sigterm"))
    for step in range(3, 3 + 2 * GO_ON_TRIES):
        play(referee, ("entered", 0, 0, step))
    assert referee.targets[-1] == (3, 2 + GO_ON_TRIES)
    referee.check_end()


def test_a_shard_that_nobody_holds_is_not_waited_for() -> None:
    referee = begun(((0,), (1,), (2,), (3,)))
    play(referee, ("die", 3))
    for rank, step in ((0, 3), (1, 2), (2, 2)):
        play(referee, ("prepared", rank, 0, step, True))
    assert (referee.machine.state, referee.machine.outcome.ending) == ("over", "gave_up")


def test_a_state_that_keeps_changing_is_not_waited_for() -> None:
    referee = begun(data_parallel(4))
    for rank in (1, 2, 3):
        play(referee, ("die", rank))
    for step in (2, 3, 4):
        play(referee, ("prepared", 0, 0, step, True))
    assert referee.machine.outcome.ending == "gave_up"
    assert "it completed another step twice" in referee.machine.outcome.reason


def test_savers_that_write_together_are_told_of_one_another() -> None:
    """Rank 0 dies: shard 0 is saved by rank 2, with rank 1. Rank 1 dies in the save: its place is taken by rank 3."""
    referee = Referee(((0, 2), (1, 3)), 4)
    machine = referee.machine
    for rank in range(4):
        referee.join(rank)
        referee.say(rank, m.Begin(step=0, durable=0, buffer_fd=-1, together=((0, 1),)))
    referee.die(0)
    for rank in (1, 2, 3):
        referee.say(rank, m.Prepared(recovery=1, step=2, durable=0, usable=True))
    assert {rank: order.together for rank, order in referee.saves[machine.plan].items()} == {
        2: ((2, 1),),
        1: ((2, 1),),
    }
    referee.die(1)
    assert {rank: order.together for rank, order in referee.saves[machine.plan].items()} == {
        2: ((2, 3),),
        3: ((2, 3),),
    }
    referee.check_end()
