"""The example of docs/sizing.md runs, and the page documents every column."""

import re
from pathlib import Path

import pytest

from shoal.sizing.predict.tables import COLUMNS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def test_documentation_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    shown = "".join(re.findall(r"```\n```\n(.*?)```", PAGE, re.DOTALL))
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
def test_every_column_is_documented(column: object) -> None:
    for name in (column.name, *column.aliases):
        assert f"`{name}`" in PAGE
