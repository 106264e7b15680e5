"""The documentation as a site: built without a warning, loading nothing from elsewhere; its tables are for look-up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev.errors import DevError
from dev.site import build
from tests.unit.docs.pages import PAGES, ROOT, read

LONGEST_CELL = 120
LONGEST_PAGE = 150
MOST_WORDS, MOST_TO_UNDERSTAND = 1500, 2000
"""Outside of tables, of a page for people who train or operate, and of one that explains or tells what was measured."""
LONGER = {"docs/api.md"}  # made from the fields of the API: looked up in, not read


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


def words(page: Path) -> int:
    """Those that are read: not of tables, in which one looks something up."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def pages_of(part: str) -> list[str]:
    """The pages of a part of the site's menu."""
    [found] = re.findall(rf"^  - {part}:\n(.*?)(?=^  - )", read("mkdocs.yml"), re.MULTILINE | re.DOTALL)
    return re.findall(r"- (?:\w+: )?(\S+\.md)", found)


def test_no_page_has_more_words_than_one_reads() -> None:
    names = {str(page.relative_to(ROOT)): page for page in PAGES}
    explains = {*pages_of("Understand")}
    assert "docs/loop.md" in explains
    most = {name: MOST_TO_UNDERSTAND if name in explains else MOST_WORDS for name in names}
    found = {name: (count, most[name]) for name, page in names.items() if (count := words(page)) > most[name]}
    assert {name: pair for name, pair in found.items() if name not in LONGER} == {}, "split it, or leave out"


SEEN = re.compile(r"\b(should|worked|works when|shows?|says?|prints?|lists?|logs|ends with)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_say_what_one_should_see(page: Path) -> None:
    """In each section that has some: their output, or words about it."""
    for part in re.split(r"^(?=##+ )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        found = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        kinds = {kind for kind, _ in found}
        prose = re.sub(r"^```.*?^```$", "", part, flags=re.MULTILINE | re.DOTALL)
        output = kinds & {"", "text"} or any(
            kind == "console" and any(line and not line.startswith("$") for line in block.splitlines())
            for kind, block in found
        )
        if kinds & {"sh", "console"}:
            assert output or SEEN.search(prose), f"{part.splitlines()[0]}: what does success look like?"


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
