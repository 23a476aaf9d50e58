"""What verification says: damages and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from .manifest import ManifestProblem

DamageKind = Literal["no_manifest", "bad_manifest", "missing", "size", "digest", "unreadable", "foreign"]


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with one file. `offset` and `length` in bytes; length 0 means the whole file."""

    file: str
    kind: DamageKind
    offset: int = 0
    length: int = 0
    detail: str
    proven: bool = False
    """The content was read and is bad; it will not get better. Only then may it be quarantined."""

    def __str__(self) -> str:
        where = f" bytes {self.offset}-{self.offset + self.length}" if self.length else ""
        return f"{self.file}{where}: {self.detail}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found about its share of one checkpoint. `step` is None when no manifest tells it."""

    path: Path
    step: int | None
    ok: bool
    damages: tuple[Damage, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """One line per damage, naming file and byte range."""
        return [str(damage) for damage in self.damages]

    @property
    def proven(self) -> bool:
        """Whether some damage is proven rather than a failure to read."""
        return any(damage.proven for damage in self.damages)


def of_manifest(checkpoint: Path, problem: ManifestProblem) -> Damage:
    """The damage that a manifest's problem is."""
    return Damage(
        file=checkpoint.name,
        kind="no_manifest" if problem.kind == "missing" else "bad_manifest",
        detail=problem.text,
        proven=problem.kind == "damaged",
    )


def of_error(file: str, offset: int, length: int, error: OSError) -> Damage:
    """The damage that a failed read is; not proven, since the next read may succeed."""
    detail = f"cannot be read: {error.strerror or error}"
    return Damage(file=file, kind="unreadable", offset=offset, length=length, detail=detail)


def merge(damages: list[Damage]) -> list[Damage]:
    """Join neighbours of one file that lie next to each other and say the same."""
    merged: list[Damage] = []
    for damage in damages:
        last = merged[-1] if merged else None
        if last and _touches(last, damage):
            merged[-1] = msgspec.structs.replace(last, length=last.length + damage.length)
        else:
            merged.append(damage)
    return merged


def _touches(last: Damage, damage: Damage) -> bool:
    same = (last.file, last.kind, last.detail) == (damage.file, damage.kind, damage.detail)
    return same and last.offset + last.length == damage.offset
