"""Completion of `kubectl shoal …`: commands, options, files."""

from __future__ import annotations

import sys

import pytest

from shoal.cli.complete import main


@pytest.mark.parametrize(
    ("words", "some", "directive"),
    [
        (["st"], {"status"}, ":4"),
        ([""], {"status", "submit", "top"}, ":4"),
        (["submit", "--fol"], {"--follow"}, ":4"),
        (["submit", "--file", ""], set(), ":4"),
        (["plan", "-f", ""], set(), ":0"),
        ([], {"list"}, ":4"),
    ],
)
def test_candidates(
    words: list[str],
    some: set[str],
    directive: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-shoal", *words])
    main()
    *found, last = capsys.readouterr().out.split()
    assert some <= set(found)
    assert last == directive
    assert len(words) != 1 or not words[0] or all(each.startswith(words[0]) for each in found)
