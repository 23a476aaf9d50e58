"""Tables of the documentation say what the code does."""

from __future__ import annotations

import pytest

from support.tables import TABLES, in_page


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_table_is_the_one_that_the_code_makes(name: str) -> None:
    assert in_page(name) == TABLES[name][1](), "run: python tests/support/tables.py"
