"""What training has changed of the user's values, from a gasp to the restart that begins with it.

A value is restored where the script still begins with what it began with in the run that was saved, and on all ranks or
on none: ranks that count differently may wait for each other without end. A rank that has saved nothing, because it
died, only gets what at least two others had and all others had alike. What was set before the first step (a time, the
number of the process) is the new process's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import Big, Long, content_of, in_host_memory
from lastgasp.pytorch.uservalues.keeper import UserValues
from lastgasp.pytorch.uservalues.kinds import put_attributes
from lastgasp.pytorch.uservalues.memory import Known, overlapping
from lastgasp.pytorch.uservalues.places import Common, Name, Places, Root, names
from lastgasp.pytorch.uservalues.portable import can_be_made, decode, encode
from lastgasp.pytorch.uservalues.telling import Told, told

LIMIT = 4 << 20
"""Bytes of one rank, at most; all ranks have no more than `TOTAL`, since one of them writes the values of all."""
TOTAL = 64 << 20
_VERSION = 2
_ABSENT = b""
"""The digest of an attribute that is not there."""
_NAMED = 4


class _Value(msgspec.Struct, frozen=True, array_like=True):
    """Attributes: digest when the fit began; the value.

    kept: by the numbers of objects in it, all ways to those of them that were there when the fit began: that very
        object of the new process gets the content. shared: names of the tensors that other attributes have, too.
    """

    began: bytes
    data: bytes
    kept: dict[int, list[list[Any]]]
    shared: dict[int, str]


class _OfRank(msgspec.Struct, frozen=True, array_like=True):
    """Attributes: by object and attribute; what has changed and cannot be written; why nothing is here.

    together: attributes that have something in common, so that they are restored all or none.
    """

    version: int
    values: dict[str, dict[str, _Value]] = {}
    lost: list[str] = []
    why: str = ""
    together: list[list[str]] = []


@dataclass(frozen=True)
class Began:
    """How the values were at one moment: when a fit began, before anything was restored; before its first step.

    Attributes:
        digests: by object and attribute; None where it cannot be written. told: of those.
        places: of all that was there.
    """

    digests: dict[str, dict[str, bytes | None]] = field(default_factory=dict)
    told: dict[Name, Told] = field(default_factory=dict)
    places: Places = field(default_factory=Places)

    @classmethod
    def of(cls, roots: Iterable[Root], known: Iterable[object]) -> Began:
        """As they are now. Never raises."""
        left_out, began = Known(known), cls()
        here, written = list(roots), list[Any]()
        all_values, unwritten = dict[Name, Any](), dict[Name, Any]()
        names = [root.name for root in here]
        for root in here:
            if names.count(root.name) > 1:  # which is which is not known in the next process
                continue
            try:
                own = content_of(root.value, kinds.OBJECT, root.skip)
            except Exception:  # the user's object
                continue
            found = began.digests.setdefault(root.name, {})
            for name, value in own.items():
                data, objects = _encoded(value, content_of, left_out)
                found[name] = None if data is None else _digest(data)
                written += objects
                if data is None:
                    unwritten[root.name, name] = value
                all_values[root.name, name] = value
        began.places.look_at_all(all_values, left_out)
        apart = set(map(id, written))
        began.told.update((name, told(value, content_of, left_out, apart, LIMIT)) for name, value in unwritten.items())
        return began


def changed(values: UserValues, began: Began, start: Began, world_size: int) -> bytes:
    """What training has changed, as of the last boundary. Any thread may ask while that stands. Never raises.

    Args:
        began: when the fit began; start: before its first step.
    """
    try:
        if why := values.cannot():
            return _no_values(why)
        found = msgspec.msgpack.encode(_changed(values, began, start))
    except Exception as error:  # the user's objects, which training may be changing at this moment
        return _no_values(f"{type(error).__name__}: {error}")
    limit = min(LIMIT, TOTAL // world_size)
    return found if len(found) <= limit else _no_values(f"they have {len(found) / 1e6:.3g} MB, more than are saved")


def _no_values(why: str) -> bytes:
    return msgspec.msgpack.encode(_OfRank(_VERSION, why=_short(why)))


def _short(why: object) -> str:
    return str(why)[:200].encode(errors="replace").decode()


@dataclass
class _Own:
    """An attribute that can be restored, as it is."""

    began: bytes
    data: bytes
    objects: list[Any]


def _changed(values: UserValues, began: Began, start: Began) -> _OfRank:
    large = list[Big]()
    contents, left_out = _at_boundary(values, large), Known(values.left_out)
    own, now = dict[Name, _Own](), Places()
    lost, carried = set[Name](), set[Name]()
    unwritten, written = dict[Name, Any](), list[Any]()
    for root in values.roots:
        place, present = root.name, contents(root.value, kinds.OBJECT)
        if place not in began.digests or place not in start.digests:  # it saves itself, or was added since
            first, before = None, dict[str, bytes | None]()
        else:
            first, before = began.digests[place], start.digests[place]
        lost |= {(place, name) for name in before.keys() - present.keys()}
        for name, value in present.items():
            here = (place, name)
            now.look(here, value, contents, left_out)
            if first is None:
                continue
            was, then = first.get(name, _ABSENT), before.get(name, _ABSENT)
            if then is None:
                unwritten[here] = value
                continue
            data, objects = _encoded(value, contents, left_out)
            written += objects
            if data is None or was is None:
                if data is None or _digest(data) != then:
                    lost.add(here)
                continue
            own[here] = _Own(was, data, objects)
            if _digest(data) != then:
                carried.add(here)
    apart = set(map(id, written))
    lost |= {name for name, value in unwritten.items()
             if start.told[name] != told(value, contents, left_out, apart, LIMIT)}  # fmt: skip
    common = Common(began.places, start.places, now, own.keys())
    if why := next(filter(None, (one.changed() for one in large)), ""):  # while it was written
        return _OfRank(_VERSION, why=_short(why))
    views = overlapping([*now.all(), *values.left_out])
    for view in overlapping(start.places.all()).values():
        left = names({*start.places.paths(view)}.difference(now.paths(view)))  # the same numbers may be there
        carried, lost = carried | (left & own.keys()), lost | (left - own.keys())
    carried = common.with_others(carried)
    lost |= common.torn(carried)
    for here in own.keys() - carried:
        if any(id(part) in views and not start.places.paths(part) for part in own[here].objects):
            lost.add(here)
    found: dict[str, dict[str, _Value]] = {}
    for place, name in carried - lost:
        one = own[place, name]
        kept = {i: common.kept(part, carried) for i, part in enumerate(one.objects)}
        if any(not kept[i] and (id(part) in views or not can_be_made(part)) for i, part in enumerate(one.objects)):
            lost.add((place, name))
            continue
        shared = {i: common.name_of(part) for i, part in enumerate(one.objects) if not kept[i]}
        found.setdefault(place, {})[name] = _Value(
            one.began, one.data, {i: [list(path) for path in paths] for i, paths in kept.items() if paths},
            {i: tag for i, tag in shared.items() if tag},
        )  # fmt: skip
    groups = {tuple(sorted(map(".".join, one))) for one in common.groups(carried, unwritten)}  # many have the same
    return _OfRank(_VERSION, found, sorted(map(".".join, lost)), "", list(map(list, sorted(groups))))


def _at_boundary(values: UserValues, large: list[Big]) -> Callable[[Any, str], Any]:
    """What was in a value at the last boundary. Those too large to have been copied are added to `large`."""
    index: dict[tuple[int, str], Any] = {}
    for row in values.rows:
        if isinstance(row.content, Long):
            for inner in row.content.rows:
                index.setdefault((id(inner.value), inner.kind), inner.content)
        index.setdefault((id(row.value), row.kind), row.content)

    def contents(value: Any, kind: str) -> Any:
        big = values.big.get(id(value))
        if big is not None and big.found() is value and (id(value), kind) not in index and in_host_memory(value):
            large.append(big)
            return content_of(value, kind)
        if kind is kinds.TUPLE and (id(value), kind) not in index:  # a key of a dict, and cannot change
            return content_of(value, kind)
        content = index[id(value), kind]
        return content.items if isinstance(content, Long) else content

    return contents


def _encoded(value: Any, contents: Callable[[Any, str], Any], known: Known) -> tuple[bytes | None, list[Any]]:
    try:
        return encode(value, contents, known, LIMIT)
    except Exception:  # NotPortable, and whatever the user's objects raise
        return None, []


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


class Carried:
    """What the ranks have saved.

    Args:
        by_rank: of each that has, what `changed` returned; world_size: how many there were.
        alike: names of objects that ranks have alike, so that one rank's values are those of any.
    """

    def __init__(self, by_rank: Mapping[int, bytes], world_size: int, alike: Collection[str] = ()) -> None:
        read = {rank: _read(data) for rank, data in by_rank.items()}
        self._ranks = {rank: one for rank, one in read.items() if not one.why}
        self._missing = [rank for rank in range(world_size) if rank not in self._ranks]
        self._why = next((f" ({one.why})" for one in read.values() if one.why), "")
        self._refused: dict[str, str] = {}
        self._left: dict[str, str] = {}
        self._alike(alike)
        self._puts: list[tuple[Root, str, Any, Callable[[], None]]] = []

    def _alike(self, alike: Collection[str]) -> None:
        """Leave out what not all ranks can have, and all of an object of which a part was lost.

        Where training has set a flag and opened a file, say, the one is worth nothing without the other.
        """
        for name in sorted({name for one in self._ranks.values() for name in one.lost}):
            self._refused[name] = "it cannot be written"
            self._refuse_all_beside(name, self._refused)
        self._refuse_together(self._refused)
        if not self._missing:
            return
        first, *others = self._ranks.values() if self._ranks else [_OfRank(_VERSION)]
        for place in {place for one in self._ranks.values() for place in one.values}:
            alone = not others and place not in alike
            if alone or any(one.values.get(place) != first.values.get(place) for one in others):
                ranks = ", ".join(map(str, self._missing[:8]))
                self._refused |= {
                    name: f"rank {ranks} left none{self._why}"
                    for one in self._ranks.values() for name in _names(place, one) if name not in self._refused
                }  # fmt: skip
        self._refuse_together(self._refused)

    def _refuse_together(self, refused: dict[str, str]) -> None:
        """What has something in common with what is refused is so, too: it would be two things. On all ranks alike."""
        groups = [group for one in self._ranks.values() for group in one.together]
        more = True
        while more:
            more = False
            for group in groups:
                first = next((name for name in group if name in refused), None)
                for name in set(group) - refused.keys() if first is not None else ():
                    refused[name], more = f"it has something in common with {first}", True
                    self._refuse_all_beside(name, refused)

    def _refuse_all_beside(self, name: str, refused: dict[str, str]) -> None:
        place = name.rpartition(".")[0]
        for one in self._ranks.values():
            for other in _names(place, one):
                refused.setdefault(other, f"{name} was lost")

    @property
    def any(self) -> bool:
        """Whether there is a value to restore, or one to name."""
        return any(one.values or one.lost for one in self._ranks.values())

    @property
    def refused(self) -> dict[str, str]:
        """Values that no process can have again, and why."""
        return dict(self._refused)

    @property
    def why(self) -> str:
        """Why a rank has saved none; empty if all have, but for those that are gone."""
        return self._why[2:-1]

    @property
    def names(self) -> frozenset[str]:
        """Of the values that the same script can have again."""
        found = {name for one in self._ranks.values() for place in one.values for name in _names(place, one)}
        return frozenset(found - self._refused.keys())

    def leave(self, places: Collection[str], why: str) -> None:
        """Have no rank restore what these objects had. Before `prepare`."""
        self._left |= {name: why for one in self._ranks.values() for place in places for name in _names(place, one)}

    def prepare(self, rank: int, roots: Iterable[Root], began: Began, device: torch.device) -> bytes:
        """Look at what can be restored in this process. Returns what to tell the other ranks."""
        own = self._ranks.get(rank) or next(iter(self._ranks.values()))
        refused, shared = dict(self._left), dict[str, Any]()
        by_name = {root.name: root for root in roots}
        for place, values in own.values.items():
            root, before = by_name.get(place), began.digests.get(place, {})
            for name, value in values.items():
                full = f"{place}.{name}"
                if full in self._refused or full in self._left:
                    continue
                here = {i: began.places.exactly(paths) for i, paths in value.kept.items()}
                other = any(one is None for one in here.values())
                if root is None or before.get(name, _ABSENT) != value.began or other:
                    refused[full] = "the script begins with another value"
                    continue
                here |= {i: shared[tag] for i, tag in value.shared.items() if tag in shared}
                try:
                    found, fill, objects = decode(value.data, device, here)
                    shared |= {tag: objects[i] for i, tag in value.shared.items()}
                except Exception as error:  # NotPortable, or the user's objects
                    refused[full] = _short(error)
                    self._refuse_all_beside(full, refused)
                    continue
                self._puts.append((root, name, found, fill))
        return msgspec.msgpack.encode(refused)

    def restore(self, told: Iterable[bytes]) -> str:
        """Restore what no rank has refused. Returns what to note, one line; empty if nothing is missing."""
        refused = dict(self._refused)
        for one in told:
            refused |= msgspec.msgpack.decode(one, type=dict[str, str])
        self._refuse_together(refused)
        for root, name, found, fill in self._puts:
            if (full := f"{root.name}.{name}") in refused:
                continue
            try:
                fill()
                put_attributes(root.value, {name: found}, root.skip, remove=False)
            except Exception as error:  # the user's object
                refused[full] = _short(error)
        if not refused:
            return ""
        named = [f"{name}: {why}" for name, why in sorted(refused.items())]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return f"what training had changed begins with the script's value ({'; '.join(named[:_NAMED])}{more})"


def _names(place: str, one: _OfRank) -> list[str]:
    return [f"{place}.{name}" for name in one.values.get(place, {})]


def _read(data: bytes) -> _OfRank:
    try:
        found = msgspec.msgpack.decode(data, type=_OfRank)
    except ValueError as error:  # msgspec's errors are ValueErrors
        return _OfRank(_VERSION, why=str(error))
    return found if found.version == _VERSION else _OfRank(_VERSION, why=f"of version {found.version}")
