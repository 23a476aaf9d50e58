"""The results of verification: damages and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from .manifest import ManifestProblem

DamageKind = Literal["no_manifest", "bad_manifest", "missing", "size", "digest", "unreadable", "foreign"]


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One damage of one file. `offset` and `length` in bytes; length 0 means the entire file."""

    file: str
    kind: DamageKind
    offset: int = 0
    length: int = 0
    detail: str
    proven: bool = False
    """Whether the content was read and is bad, which is permanent. Only then may it be quarantined."""

    def __str__(self) -> str:
        where = f" bytes {self.offset}-{self.offset + self.length}" if self.length else ""
        return f"{self.file}{where}: {self.detail}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's result for its share of one checkpoint. `step` is None without a manifest."""

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
    """The damage for a manifest's problem."""
    return Damage(
        file=checkpoint.name,
        kind="no_manifest" if problem.kind == "missing" else "bad_manifest",
        detail=problem.text,
        proven=problem.kind == "damaged",
    )


def of_error(file: str, offset: int, length: int, error: OSError) -> Damage:
    """The damage for a failed read; not proven, since the next read may succeed."""
    detail = f"cannot be read: {error.strerror or error}"
    return Damage(file=file, kind="unreadable", offset=offset, length=length, detail=detail)


def merge(damages: list[Damage]) -> list[Damage]:
    """Merge adjacent damages of one file with the same detail."""
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
