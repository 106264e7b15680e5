"""The documentation as a site: built without a warning, loading nothing from elsewhere; its tables are for look-up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev.errors import DevError
from dev.site import build
from tests.unit.docs.pages import PAGES, ROOT

LONGEST_CELL = 120
LONGEST_PAGE = 150
LONGER = {"docs/api.md", "docs/metrics.md", "docs/reasons.md", "CHANGELOG.md"}  # looked up in, not read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    cells = (
        re.sub(r"\]\([^)]*\)", "]", cell.strip())
        for line in lines
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    )
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_enough_to_be_read(page: Path) -> None:
    if str(page.relative_to(ROOT)) not in LONGER:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST_PAGE, "split it, or leave out"


def test_site_builds_strictly_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    html = build(tmp_path / "site", diagrams=False)
    assert (html / "docs" / "keras" / "index.html").exists()
    assert (html / "examples" / "pools" / "index.html").exists(), "what the README links to comes along"
    pages = {page: page.read_text(encoding="utf-8") for page in html.rglob("*.html")}
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="((?:https?:)?//[^"]+)"')
    assert {str(page): found for page, text in pages.items() if (found := loaded.findall(text))} == {}


def test_a_link_to_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dev/site_assets", "docs"):
        (tmp_path / "repository" / name).mkdir(parents=True)
    (tmp_path / "repository" / "mkdocs.yml").write_text(
        "site_name: x\ndocs_dir: pages\nsite_dir: html\nvalidation: {anchors: warn}\n"
    )
    page = tmp_path / "repository" / "README.md"
    monkeypatch.setattr("dev.site.ROOT", tmp_path / "repository")
    page.write_text("# One\n[here](#one)\n")
    build(tmp_path / "site", diagrams=False)
    for link in ("docs/nowhere.md", "#nowhere"):
        page.write_text(f"# One\n[there]({link})\n")
        with pytest.raises(DevError, match="nowhere"):
            build(tmp_path / "site", diagrams=False)
