"""All ranks select one checkpoint: the newest that every rank accepts.

Two kinds of message, both by `ports.Gather`: each rank's list once, then one verdict per candidate that
all ranks see identically. A rank that cannot see or read it sends a bad verdict with a reason, never no message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lastgasp.errors import ProtocolError
from lastgasp.ports import Gather

from .candidates import Candidate
from .verdict import Verdict

VerifyShare = Callable[[Candidate], Verdict]


@dataclass(frozen=True)
class Agreement:
    """What all ranks decided; equal on every rank, except that candidates are the local objects.

    Args:
        chosen: the newest that all accept; None when there is none.
        rejected: path -> reasons, of every candidate newer than the chosen one, newest first.
        listed: how many candidates the ranks saw together.
        damaged: rejected ones whose content a rank proved bad. Empty when nothing was chosen: moving them all
            away would make the next start silently begin from scratch.
    """

    chosen: Candidate | None
    rejected: dict[str, list[str]]
    listed: int
    damaged: tuple[Candidate, ...] = ()


class _Listed(msgspec.Struct, frozen=True):
    path: str
    digest: str
    step: int
    created_ns: int
    problem: str | None
    proven: bool


class _Said(msgspec.Struct, frozen=True):
    reasons: list[str]
    proven: bool


_LISTS = msgspec.json.Decoder(list[_Listed])
_SAID = msgspec.json.Decoder(_Said)


def agree(local: list[Candidate], verify_share: VerifyShare, gather: Gather, rank: int, world_size: int) -> Agreement:
    """Run the agreement; every rank calls it with its own list.

    Args:
        local: what this rank sees.
        verify_share: verifies this rank's share of a candidate; an exception becomes a bad verdict.
        gather: the all-gather of the job.
        rank: this rank; world_size: the number of ranks.

    Raises:
        DeadlineExceeded: a rank did not answer in time (from `gather`).
        ProtocolError: a rank did not send a list of candidates.
    """
    mine = {str(candidate.path): candidate for candidate in local}
    lists = _gather_lists(mine, gather, world_size)
    rejected: dict[str, list[str]] = {}
    proven: list[Candidate] = []
    union = _newest_first(lists)
    for number, path in enumerate(union):
        answers = _from_lists(path, lists)
        if answers is None:
            said = _say(mine[path], verify_share)
            answers = _gather_answers(said, gather, f"agree/verdict/{number}", world_size)
        reasons = merge_reasons([answer.reasons for answer in answers])
        if not reasons:
            return Agreement(mine[path], rejected, len(union), tuple(proven))
        rejected[path] = reasons
        if any(answer.proven for answer in answers) and path in mine:
            proven.append(mine[path])
    return Agreement(None, rejected, len(union))


def _gather_lists(mine: dict[str, Candidate], gather: Gather, world_size: int) -> list[dict[str, _Listed]]:
    payloads = gather("agree/list", msgspec.json.encode([_listed(c) for c in mine.values()]))
    if len(payloads) != world_size:
        raise ProtocolError(f"{len(payloads)} ranks answered agree/list, not {world_size}: one gather per job")
    try:
        return [{item.path: item for item in _LISTS.decode(payload)} for payload in payloads]
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a rank sent no list of candidates: {error}. Do all run one version?") from error


def _listed(candidate: Candidate) -> _Listed:
    step, created_ns, path = candidate.age_key
    digest = candidate.manifest.self_digest if candidate.manifest else ""
    return _Listed(path, digest, step, created_ns, candidate.problem, candidate.proven)


def _newest_first(lists: list[dict[str, _Listed]]) -> list[str]:
    newest: dict[str, tuple[int, int, str]] = {}
    for one in lists:
        for path, item in one.items():
            newest[path] = max(newest.get(path, (-1, 0, path)), (item.step, item.created_ns, path))
    return sorted(newest, key=lambda path: newest[path], reverse=True)


def _from_lists(path: str, lists: list[dict[str, _Listed]]) -> list[_Said] | None:
    """The verdicts that follow from the lists; None when all ranks see one valid manifest."""
    digest = next((one[path].digest for one in lists if path in one and one[path].digest), "")
    answers = [_listing_says(one.get(path), digest) for one in lists]
    return answers if any(answer.reasons for answer in answers) else None


def _listing_says(item: _Listed | None, digest: str) -> _Said:
    if item is None:
        return _Said(["does not see it"], False)
    if item.problem is not None:
        return _Said([item.problem], item.proven)
    if item.digest != digest:
        return _Said([f"sees another manifest ({item.digest}, not {digest})"], False)
    return _Said([], False)


def _say(candidate: Candidate, verify_share: VerifyShare) -> _Said:
    try:
        verdict = verify_share(candidate)
    except Exception as error:  # becomes a verdict, because the other ranks wait for an answer
        return _Said([f"verification failed: {type(error).__name__}: {error}"], False)
    return _Said([] if verdict.ok else verdict.reasons or ["rejected"], verdict.proven)


def _gather_answers(said: _Said, gather: Gather, tag: str, world_size: int) -> list[_Said]:
    answers = [_decode(payload) for payload in gather(tag, msgspec.json.encode(said))]
    missing = world_size - len(answers)
    return answers + [_Said(["sent no verdict"], False)] * missing


def _decode(payload: bytes) -> _Said:
    try:
        return _SAID.decode(payload)
    except msgspec.DecodeError:
        return _Said(["sent no verdict that could be read"], False)


def merge_reasons(by_rank: list[list[str]]) -> list[str]:
    """One line per reason, naming its ranks: a thousand ranks seldom have a thousand reasons."""
    ranks: dict[str, list[int]] = {}
    for rank, given in enumerate(by_rank):
        for reason in given:
            ranks.setdefault(reason, []).append(rank)
    return [f"{_name(who)}: {reason}" for reason, who in ranks.items()]


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
