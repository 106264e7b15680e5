"""Build the documentation site: `python -m dev docs`.

The pages are those of the repository, laid out as they are there, so that every relative link holds on both. What a
page links to (a manifest, a folder of examples) comes along. Nothing of the site is loaded from another host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dev.errors import DevError
from dev.npm import MERMAID, fetched
from dev.paths import ROOT

PAGES = ("*.md", "docs/**/*.md", "examples/README.md", "charts/shoal/README.md", "dev/README.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml"}
CONFIG = "mkdocs.yml"


def build(folder: Path, *, diagrams: bool = True) -> Path:
    """Build the site under `folder`; the folder of its HTML. `diagrams`: with mermaid, which npm fetches.

    Raises:
        DevError: a link leads nowhere, a page is in no menu, or anything else that mkdocs warns of.
    """
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            _stage(page, pages)
    shutil.copytree(ROOT / "dev" / "site_assets", pages / "assets")
    if diagrams:
        shutil.copy(fetched(MERMAID), pages / "assets")
    shutil.copy(ROOT / CONFIG, folder)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", CONFIG],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DevError(f"the site cannot be built:\n{done.stdout}{done.stderr}")
    return folder / "html"


def _stage(page: Path, pages: Path) -> None:
    """Copy a page and what it links to."""

    def follow(link: re.Match[str]) -> str:
        target = (page.parent / link[1]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return link[0]  # mkdocs says so
        there = pages / target.relative_to(ROOT)
        if target.is_dir():
            _list(target, there)
            return f"{link[1].rstrip('/')}/README.md"
        if target.suffix != ".md":
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, there)
        return link[0]

    copy = pages / page.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(LINK.sub(follow, page.read_text(encoding="utf-8")), encoding="utf-8")


def _list(folder: Path, there: Path) -> None:
    """A page with the files of a folder that has no README."""
    if (folder / "README.md").exists() or (there / "README.md").exists():
        return
    there.mkdir(parents=True, exist_ok=True)
    lines = [f"# {folder.relative_to(ROOT)}", ""]
    for file in sorted(each for each in folder.iterdir() if each.suffix in LANGUAGES):
        text = file.read_text(encoding="utf-8").rstrip()
        lines += [f"## {file.name}", "", f"```{LANGUAGES[file.suffix]}", text, "```", ""]
    (there / "README.md").write_text("\n".join(lines), encoding="utf-8")
