"""Of a product of cases, those that `make test-full` takes: every two values that occur together do so in one of them.

A matrix of kinds, moments, ranks, launchers and sizes has hundreds of jobs, and all matrices take half a day on two
cores: nobody runs them, and nobody sees what fails in them. What a fault does depends on one or two of these at a time,
hardly ever on three, so a tenth of the jobs finds nearly all of it. Tests marked `product` are cut with `--covering`;
without it pytest runs all of them, e.g. those of one file whose code has changed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

OPTION = "--covering"

Row = Mapping[str, Hashable]


def add_option(parser: pytest.Parser) -> None:
    """Add `--covering`."""
    parser.addoption(OPTION, action="store_true", help="of tests marked `product`, run those that cover each pair")


def deselect_covered(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the others of its product cover, if `--covering` asks for it.

    Raises:
        pytest.UsageError: a test is marked as a product and has no parameters, whether or not the option is given.
    """
    products: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("product"):
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid}: marked `product`, but it has no parameters to choose from")
            products[item.nodeid.partition("[")[0]].append(item)
    if not config.getoption(OPTION):
        return
    left_out = set[pytest.Item]()
    for product in products.values():
        [mark, *_] = product[0].iter_markers("product")
        chosen = covering([_values(item) for item in product], *mark.args)
        left_out.update(item for n, item in enumerate(product) if n not in chosen)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def covering(rows: Sequence[Row], *once: str) -> set[int]:
    """Which rows are enough, so that each two values of a row stand together in one of them; the same ones each time.

    Of rows that differ in two columns only these would be all; there, each value stands in one of them.

    Args:
        rows: values by column; a row may lack columns.
        once: columns of so many values that each of these need only stand in one of them; they take turns.
    """
    columns = _columns(rows)
    paired = [column for column in columns if column not in once]
    groups: list[tuple[str, ...]] = [(column,) for column in columns]
    if len(paired) > 2:
        groups += combinations(paired, 2)
    held = [{(group, tuple(row.get(column) for column in group)) for group in groups} for row in rows]
    missing = set().union(*held)
    chosen = set[int]()
    used = Counter[Hashable]()
    while missing:
        spread = [-sum(used[row.get(name)] for name in once) for row in rows]
        best = max(range(len(rows)), key=lambda n: (len(held[n] & missing), spread[n]))
        chosen.add(best)
        missing -= held[best]
        used.update(rows[best].get(name) for name in once)
    return chosen


def _columns(rows: Sequence[Row]) -> list[str]:
    """Those that tell rows apart, and no two that tell apart the same ones."""
    found: dict[tuple[int, ...], str] = {}
    for column in dict.fromkeys(column for row in rows for column in row):
        values = list(dict.fromkeys(row.get(column) for row in rows))
        if len(values) > 1:
            found.setdefault(tuple(values.index(row.get(column)) for row in rows), column)
    return list(found.values())


def _values(item: pytest.Item) -> Row:
    """Parameters by name: numbers, parts of text between commas, of others which one it is; fields of a dataclass."""
    found: dict[str, Hashable] = {}
    parameters = item.callspec  # type: ignore[attr-defined]
    for name, value in parameters.params.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                found |= _parts(field.name, getattr(value, field.name), repr(getattr(value, field.name)))
        else:
            found |= _parts(name, value, parameters.indices[name])
    return found


def _parts(name: str, value: object, otherwise: Hashable) -> Row:
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    if isinstance(value, str):
        first, *others = value.split(",")
        return {name: first} | {f"{name}[{n}]": other for n, other in enumerate(others, 1)}
    return {name: value if isinstance(value, int) else otherwise}
