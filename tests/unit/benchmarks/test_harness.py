import json

import pytest

from benchmarks.harness import summary, write


def test_write_contains_each_figure_with_goal_and_met(tmp_path):
    path = tmp_path / "build" / "bench.json"
    figures = [
        summary("fast", [1.0, 3.0, 2.0], "x", "memcpy", 1.5),
        summary("small", [5.0], "MB", "the bound", 4.0, at_most=True),
        summary("plain", [1.0], "s", "nothing"),
    ]
    write(path, figures)
    fast, small, plain = json.loads(path.read_text())
    assert fast == {
        "name": "fast", "value": 2.0, "unit": "x", "against": "memcpy", "goal": 1.5, "at_most": False,
        "low": 1.0, "high": 3.0, "met": True,
    }  # fmt: skip
    assert small["met"] is False
    assert (plain["goal"], plain["met"]) == (None, None)


def test_write_with_duplicate_name_fails(tmp_path):
    figures = [summary("the same", [1.0], "x", "memcpy"), summary("the same", [2.0], "x", "numpy")]
    with pytest.raises(ValueError, match="2 figures are named 'the same'"):
        write(tmp_path / "bench.json", figures)
