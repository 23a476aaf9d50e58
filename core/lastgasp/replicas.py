"""Which ranks are replicas: proven by comparing digests of their state, never assumed from a parallel mode.

Two ranks may save for one another only if they hold the same state. A parallel mode does not prove that: a loop
without DDP whose ranks were seeded differently trains two models under one name, and what one rank saves is then loaded
by the other. So every adapter compares once before the first step, and again after each resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lastgasp.errors import ConfigError, ControlError, DeadlineExceeded, NotSaveable
from lastgasp.topology import ReplicaGroups

Digests = Mapping[str, bytes]
"""The digests of a rank's state by part ("model", "optimizer"). Names are for people; all ranks use the same ones."""
Gather = Callable[[str, bytes], list[bytes]]

log = logging.getLogger("lastgasp")

TAG = "replicas"
PIPELINES = "Stages of a pipeline cannot be saved: shard the whole model over all ranks by fully_shard (FSDP2),"
"""What to do instead of them; begins a remedy."""
_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


def needs_comparing(replicas: ReplicaGroups) -> bool:
    """Whether any rank is supposed to be another's replica; the same on all ranks."""
    return any(len(group) > 1 for group in replicas)


def compared(gather: Gather, replicas: ReplicaGroups, own: Digests) -> tuple[ReplicaGroups, str]:
    """Compare what all ranks hold. All ranks call it together.

    Args:
        gather: an all-gather that needs no process group (`Session.gather`); raises what it raises.
        replicas: the ranks that should hold the same.
        own: the digests of this rank. An empty mapping equals no other.

    Returns:
        The groups, split into parts that hold the same; and for people why one was split, empty if none was. Both are
        the same on all ranks.
    """
    found = [_decoder.decode(part) for part in gather(TAG, msgspec.msgpack.encode(dict(own)))]
    groups = split(replicas, found)
    return groups, "" if groups == replicas else _why(replicas, found)


def compared_if_possible(
    gather: Gather, replicas: ReplicaGroups, own: Digests, alike_before: bool
) -> tuple[ReplicaGroups, str]:
    """As `compared`; where the ranks cannot be asked, each is a group of its own unless they were `alike_before`."""
    try:
        return compared(gather, replicas, own)
    except (ControlError, DeadlineExceeded) as error:
        if alike_before:
            return replicas, ""
        return tuple((rank,) for group in replicas for rank in group), f"no rank is known as a replica: {error}"


def computed(digests: Callable[[], Digests]) -> Digests:
    """Return what `digests` returns; nothing if it fails, because training must not fail with it."""
    try:
        return digests()
    except Exception:
        log.exception("no digest of this rank's state could be computed")
        return {}


def require_same_names(found: Sequence[bytes]) -> None:
    """Refuse ranks of different models under one name: what one of them saves, no other can load.

    Args:
        found: the digest of each rank's names and shapes of parameters, by rank.

    Raises:
        ConfigError: on all ranks, if they are given the same.
    """
    other = next((rank for rank, one in enumerate(found) if one != found[0]), 0)
    if other:
        raise ConfigError(
            "model", f"ranks 0 and {other} hold different parameters", "the same names and shapes on all ranks",
            f"{PIPELINES} or use lastgasp's Megatron plugin.",
        )  # fmt: skip


def require_alike(alike: bool) -> None:
    """For a format with room for one copy of each shard: refuse to save it if the ranks' copies differ.

    Args:
        alike: what `Session.compare_replicas` returned.

    Raises:
        NotSaveable: all ranks would load that copy.
    """
    if not alike:
        raise NotSaveable("ranks that should be replicas do not hold the same, and all of them would load this one's")


def split(replicas: ReplicaGroups, found: Sequence[Digests]) -> ReplicaGroups:
    """Split the groups into parts of equal digests, keeping their order. `found` is indexed by rank."""
    return tuple(tuple(part) for group in replicas for part in _parts(group, found))


def is_split_of(groups: ReplicaGroups, replicas: ReplicaGroups) -> bool:
    """Whether `groups` can be the result of `split` for `replicas`."""
    rest = list(reversed(groups))
    for group in replicas:
        taken: list[int] = []
        while rest and len(taken) < len(group):
            taken += rest.pop()
        if sorted(taken) != sorted(group):
            return False
    return not rest


def _parts(group: Sequence[int], found: Sequence[Digests]) -> list[list[int]]:
    parts: dict[object, list[int]] = {}
    for rank in group:
        parts.setdefault(tuple(sorted(found[rank].items())) or ("unknown", rank), []).append(rank)
    return list(parts.values())


def _why(replicas: ReplicaGroups, found: Sequence[Digests]) -> str:
    first, other = next((parts[0][0], parts[1][0]) for group in replicas if len(parts := _parts(group, found)) > 1)
    one, two = found[first], found[other]
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    what = " and ".join(names) if one and two and names else "state, as far as is known,"
    return (
        f"ranks {first} and {other} should hold the same, but their {what} differ: neither is saved from the other, so "
        "a fault costs the steps since the last checkpoint, and that one has what one of them held"
    )
