"""The chart's README lists every value with its default; docs/install.md the spot labels that the operator knows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from shoal.api.labels import SPOT_LABELS
from tests.unit.docs.pages import PAGES, ROOT, code, read, rows, section

WHOLE = {"resources", "podSecurityContext", "securityContext", "labels"}
"""Values that are documented as one although their defaults have parts."""


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def test_helm_values_and_defaults_match_the_chart() -> None:
    table = rows(section(read("charts/shoal/README.md"), "Values"))
    documented = {code(name)[0]: yaml.safe_load(code(default)[0]) for name, default, _ in table}
    assert documented == leaves(yaml.safe_load(read("charts/shoal/values.yaml")))


def test_nobody_is_told_to_install_a_package_that_the_project_has_not_published() -> None:
    """The name may be somebody else's in a registry: until there is a release, extras are those of a checkout."""
    sources = [path for room in ("operator", "trainer_image") for path in (ROOT / room).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in [*PAGES, *sources]}
    published = re.compile(r"""pip install (-\S+ )*["']?shoal\b""")
    assert [str(path) for path, text in texts.items() if published.search(text)] == []


def test_spot_labels_are_documented() -> None:
    text = section(read("docs/install.md"), "Spot signals by platform")
    assert [label for label in SPOT_LABELS if label not in text] == []


@pytest.mark.parametrize("page", ["docs/install.md", "docs/accelerators.md"])
def test_worker_logs_the_line_that_tells_its_gpu(page: str) -> None:
    promised = [words for words in code(read(page)) if words.startswith("ready in …")]
    assert promised
    logged = read("trainer_image/shoal_trainer/worker/main.py")
    for words in promised:
        assert re.search(re.sub(r"\d+", "%d", words).replace("…", ".*"), logged), words


def test_pinned_versions_match_the_lock_file() -> None:
    lock, page = read("lock/worker.txt"), read("docs/install.md")
    for package, name in (("tensorflow", "TensorFlow"), ("keras", "Keras")):
        version = (
            next(line for line in lock.splitlines() if line.startswith(f"{package}=="))
            .split("==")[1]
            .split()[0]
        )
        assert f"{name} {version}" in page
