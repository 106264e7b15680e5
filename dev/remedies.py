"""What `shoal explain` advises: the words after *Do:* on the pages of troubleshooting, by the reason of the entry."""

from __future__ import annotations

import json
import re

from dev.paths import ROOT

PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting-running.md")]
FILE = ROOT / "operator" / "shoal" / "client" / "remedies.json"


def remedies(page: str) -> str:
    """The page as JSON: reason -> words of a message -> what to do then; without words: what to do otherwise.

    Of several entries about a reason, those after the first are for messages with the words that they quote.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in re.findall(r"^- (.*(?:\n  .*)*)", page, flags=re.MULTILINE):
        text = " ".join(entry.split())
        subject, _, do = text.partition(" *Do:* ")
        quoted = re.search('"([^"]+)"', subject)
        for reason in re.findall(r"\b[A-Z][A-Za-z]+\b", _named(subject)):
            if reason not in found:
                found[reason] = {"": _plain(do)}
            elif quoted:
                found[reason][quoted[1]] = _plain(do)
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _named(subject: str) -> str:
    """The reasons at the beginning of an entry, as in "`Degraded: PoolNotFound` or `NoPoolInZone`: …"."""
    begin = re.match(r"`[^`]+`(?:(?:,| or) `[^`]+`)*", subject)
    return re.sub(r"[A-Z][A-Za-z]+(=False)?: ", "", begin[0]) if begin else ""


def _plain(text: str) -> str:
    """Without Markdown: `[how](guarantees.md#x)` becomes "how (docs/guarantees.md)"."""
    text = re.sub(r"\[([^]]*\.md)\]\([^)]*\)", r"docs/\1", text)
    text = re.sub(r"\(\[([^]]*)\]\(([^)#]*)[^)]*\)\)", r"(docs/\2)", text)
    text = re.sub(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", r"\1 (docs/\2)", text)
    return text.replace("`", "").replace("*", "").rstrip(".")
