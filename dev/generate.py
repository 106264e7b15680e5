"""Generate the CRDs (in `crds/` and the chart) and docs/api.md from `shoal.api`, and what `shoal explain` advises.

`--check` only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dev.remedies import FILE, PAGES, remedies
from shoal.api.crd import files
from shoal.api.reference import reference

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "crds", ROOT / "charts" / "shoal" / "files" / "crds")


def generated() -> dict[Path, str]:
    """The generated files and their content."""
    crds = {folder / name: text for folder in FOLDERS for name, text in files().items()}
    return crds | {
        ROOT / "docs" / "api.md": reference(),
        FILE: remedies("\n".join(page.read_text() for page in PAGES)),
    }


def stale() -> list[Path]:
    """The files that are out of date, and CRD files that are not generated."""
    expected = generated()
    differing = [path for path, text in expected.items() if not path.exists() or path.read_text() != text]
    extra = [path for folder in FOLDERS for path in folder.glob("*.yaml") if path not in expected]
    return differing + extra


def main() -> None:
    """Write the files, or with `--check` name those that are stale and exit 1."""
    if "--check" in sys.argv[1:]:
        if found := stale():
            print("stale, run `make generate`:", *(str(p.relative_to(ROOT)) for p in found), file=sys.stderr)
            sys.exit(1)
        return
    for path in stale():
        if path in generated():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated()[path])
            print("wrote", path.relative_to(ROOT))
        else:
            path.unlink()
            print("removed", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
