"""Which cases of a product of values cover it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from support.products import OPTION, covering

ROWS: list[Any] = [{"kind": k, "moment": m, "rank": r} for k, m, r in itertools.product("abcd", range(5), (0, 1))]


def pairs(rows: list[Any]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_each_two_values_that_occur_together_do_so_in_one_that_is_taken() -> None:
    rows = [row for row in ROWS if (row["kind"], row["moment"]) != ("a", 3)]
    taken = [rows[n] for n in covering(rows)]
    assert pairs(taken) == pairs(rows)
    assert len(taken) < 24 < len(rows)


def test_of_two_columns_each_value_is_taken_once() -> None:
    taken = [ROWS[n] for n in covering([{**row, "rank": 0} for row in ROWS])]
    assert len(taken) == 5
    assert {row["kind"] for row in taken} == set("abcd") and {row["moment"] for row in taken} == set(range(5))


def test_values_of_a_column_that_need_stand_only_once_take_turns() -> None:
    rows = [{**row, "layout": layout} for layout, row in itertools.product(range(7), ROWS)]
    taken = [rows[n] for n in covering(rows, "layout")]
    assert {row["layout"] for row in taken} == set(range(7))
    assert pairs([{k: v for k, v in row.items() if k != "layout"} for row in taken]) == pairs(ROWS)
    assert len(taken) < 24


def test_rows_may_lack_columns_and_columns_may_say_the_same() -> None:
    rows: list[Any] = [{"a": 1, "b": 1, "c": "x"}, {"a": 2, "b": 2}, {"a": 3, "b": 3, "c": "y"}]
    assert covering(rows) == {0, 1, 2}


def test_pytest_takes_them_where_it_is_told_to(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from support.products import add_option as pytest_addoption, deselect_covered\n"
        "def pytest_collection_modifyitems(config, items):\n    deselect_covered(config, items)\n"
    )
    pytester.makepyfile(
        """
        import dataclasses, itertools, pytest

        @dataclasses.dataclass(frozen=True)
        class Case:
            kind: str
            where: tuple[str, ...]
            rank: int

        @pytest.mark.product
        @pytest.mark.parametrize(
            "case", [Case(k, (f"{m},{m}",), r) for k, m, r in itertools.product("abc", "uvw", (0, 1))]
        )
        def test_product(case): pass

        @pytest.mark.parametrize("n", range(4))
        def test_other(n): pass
        """
    )
    marks = ("-o", "markers=product", "-p", "no:xdist")
    pytester.runpytest(*marks).assert_outcomes(passed=22)
    pytester.runpytest(*marks, OPTION).assert_outcomes(passed=13, deselected=9)


def test_a_product_without_parameters_is_named_without_the_option_too(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from support.products import add_option as pytest_addoption, deselect_covered\n"
        "def pytest_collection_modifyitems(config, items):\n    deselect_covered(config, items)\n"
    )
    pytester.makepyfile("import pytest\n@pytest.mark.product\ndef test_alone(): pass\n")
    for options in ((), (OPTION,)):
        result = pytester.runpytest("-o", "markers=product", "-p", "no:xdist", *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*test_alone: marked `product`, but it has no parameters*"])
