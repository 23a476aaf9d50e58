"""Digests of data sets, which are the same in every process and on every rank."""

from __future__ import annotations

import uuid
from typing import Any

from torch.utils.data import DataLoader

from lastgasp.pytorch.fingerprints import of_data


class Table:
    """As those of the library `datasets` and of pyarrow, of one column."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def slice(self, begin: int, count: int) -> Table:
        """Some rows."""
        return Table(self._rows[begin : begin + count])

    def to_pylist(self) -> list[dict[str, Any]]:
        """All rows."""
        return [{"x": row} for row in self._rows]

    def column(self, number: int) -> Any:
        """Of scalars, which `as_py` makes numbers of."""
        return [type("Scalar", (), {"as_py": lambda _, row=row: row})() for row in self._rows]


class Mapped:
    """As `datasets.Dataset` after a `map` whose function cannot be hashed: its fingerprint is random."""

    column_names = ("x",)

    def __init__(self, rows: list[Any], chosen: list[int] | None = None) -> None:
        self.data, self._indices = Table(rows), Table(chosen) if chosen is not None else None
        self.num_rows = len(self)
        self._fingerprint = uuid.uuid4().hex

    def __len__(self) -> int:
        return len(self.data._rows if self._indices is None else self._indices._rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("runs the user's transform, which may take random numbers")


def digest(*args: Any) -> str:
    return of_data([DataLoader(Mapped(*args))])  # type: ignore[arg-type]


def test_a_mapped_data_set_is_known_by_its_rows() -> None:
    rows = list(range(20))
    assert digest(rows) == digest(rows)
    assert digest(rows, [4, 3, 9]) == digest(rows, [4, 3, 9])
    others: list[tuple[Any, ...]] = [(rows,), (rows[:-1],), ([*rows[:-1], 7],), ([],)]
    others += [(rows, chosen) for chosen in (rows[::-1], [4, 3, 9], [4, 3, 8])]
    assert len({digest(*other) for other in others}) == len(others)


def test_a_mapped_data_set_without_readable_rows_is_known_by_its_length() -> None:
    class Unreadable(Mapped):
        data = property(lambda self: 1 / 0, lambda self, value: None)

        def __len__(self) -> int:
            return 3

    one, other = Unreadable([1]), Unreadable([2])
    assert of_data([one]) == of_data([other])
