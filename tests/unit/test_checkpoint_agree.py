"""All ranks choose the same checkpoint, whatever each of them sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp.checkpoint import Agreement, Candidate, Damage, FileEntry, Provenance, Verdict, agree
from lastgasp.checkpoint.manifest import Manifest, build
from lastgasp.errors import ProtocolError
from lastgasp.ports import Gather
from support.checkpoint_kit import as_ranks

STATES = ("good", "bad", "unseen", "differs", "problem", "raises")


def _manifest(step: int) -> Manifest:
    entry = FileEntry(path=f"step-{step}.ckpt", size=0, xxh3_128="0" * 32, chunk_size=1, chunks=())
    return build(Provenance(format="t", step=step, kind="gasp", job="j"), (entry,))


MANIFESTS = {step: _manifest(step) for step in range(5)}
OTHERS = {step: _manifest(step) for step in range(5)}


def _local(states: dict[int, str]) -> list[Candidate]:
    found = []
    for step, state in states.items():
        path = Path(f"/c/step-{step}.ckpt")
        if state == "problem":
            found.append(Candidate(path, step, None, "manifest was changed", proven=True))
        elif state != "unseen":
            found.append(Candidate(path, step, (OTHERS if state == "differs" else MANIFESTS)[step]))
    return found


def _run(ranks: list[dict[int, str]]) -> list[Agreement]:
    def body(rank: int, gather: Gather) -> Agreement:
        def verify_share(candidate: Candidate) -> Verdict:
            assert candidate.step is not None
            state = ranks[rank][candidate.step]
            if state == "raises":
                raise RuntimeError("bug in a rank")
            damage = Damage(file="f", kind="digest", length=4, detail="differs", proven=True)
            damages = (damage,) if state == "bad" else ()
            return Verdict(path=candidate.path, step=candidate.step, ok=not damages, damages=damages)

        return agree(_local(ranks[rank]), verify_share, gather, rank, len(ranks))

    return as_ranks(len(ranks), body)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.fixed_dictionaries({step: st.sampled_from(("good", *STATES)) for step in range(4)}),
            min_size=size,
            max_size=size,
        )
    )
)
def test_every_rank_decides_the_same_and_right(ranks: list[dict[int, str]]) -> None:
    answers = _run(ranks)
    first = answers[0]
    for answer in answers:
        assert answer.rejected == first.rejected
        assert answer.listed == first.listed
        assert (answer.chosen and answer.chosen.path) == (first.chosen and first.chosen.path)
    accepted = [s for s in range(4) if _accepted([states[s] for states in ranks])]
    assert (first.chosen.step if first.chosen else None) == max(accepted, default=None)
    assert all(reasons for reasons in first.rejected.values())


def _accepted(states: list[str]) -> bool:
    # A rank that sees another manifest than all the others is bad; when all see that one, it is the one.
    return set(states) == {"good"} or set(states) == {"differs"}


def test_reasons_name_the_ranks() -> None:
    sight = [{1: "good", 2: "bad"}, {1: "good", 2: "bad"}, {1: "good", 2: "raises"}, {1: "good", 2: "bad"}]
    answer = _run(sight)[0]
    assert answer.chosen is not None
    assert answer.chosen.step == 1
    assert answer.rejected["/c/step-2.ckpt"] == [
        "ranks 0-1,3: f bytes 0-4: differs",
        "rank 2: verification failed: RuntimeError: bug in a rank",
    ]
    assert [candidate.step for candidate in answer.damaged] == [2]


def test_what_a_rank_does_not_see_is_a_reason() -> None:
    answer = _run([{1: "good", 2: "good"}, {1: "good", 2: "unseen"}])[0]
    assert answer.rejected == {"/c/step-2.ckpt": ["rank 1: does not see it"]}
    assert answer.damaged == ()
    answer = _run([{2: "good"}, {2: "differs"}])[0]
    (reason,) = answer.rejected["/c/step-2.ckpt"]
    assert reason.startswith("rank 1: sees another manifest")


def test_nothing_chosen_names_nothing_to_move() -> None:
    for answer in _run([{1: "bad"}, {1: "good"}]):
        assert answer.chosen is None
        assert answer.damaged == ()
        assert answer.listed == 1


def test_nothing_there() -> None:
    assert _run([{}, {}])[0] == Agreement(None, {}, 0)


def test_a_rank_that_talks_nonsense() -> None:
    def nonsense(tag: str, payload: bytes) -> list[bytes]:
        return [payload, b"\xff"] if tag != "agree/list" else [payload, payload]

    def good(candidate: Candidate) -> Verdict:
        return Verdict(path=candidate.path, step=candidate.step, ok=True)

    local = _local({1: "good"})
    answer = agree(local, good, nonsense, 0, 2)
    assert answer.chosen is None
    assert answer.rejected["/c/step-1.ckpt"] == ["rank 1: sent no verdict that could be read"]
    with pytest.raises(ProtocolError, match="no list"):
        agree(local, good, lambda _, payload: [payload, b"{"], 0, 2)
    with pytest.raises(ProtocolError, match="not 2"):
        agree(local, good, lambda _, payload: [payload], 0, 2)


def test_a_candidate_without_step_is_older_than_any() -> None:
    bare = dataclasses.replace(_local({1: "good"})[0], path=Path("/c/last.ckpt"), step=None)

    def good(candidate: Candidate) -> Verdict:
        return Verdict(path=candidate.path, step=candidate.step, ok=True)

    answer = agree([bare, *_local({0: "good"})], good, lambda _, payload: [payload], 0, 1)
    assert answer.chosen is not None
    assert answer.chosen.step == 0
