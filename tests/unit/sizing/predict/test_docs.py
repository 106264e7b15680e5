"""docs/sizing.md documents every column of the files that the predictor reads."""

from pathlib import Path

import pytest

from shoal.sizing.predict.tables import COLUMNS

PAGE = (Path(__file__).parents[4] / "docs" / "sizing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
def test_every_column_is_documented(column: object) -> None:
    for name in (column.name, *column.aliases):
        assert f"`{name}`" in PAGE
