import json

import pytest

from benchmarks.harness import record, summary, write


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


def test_record_replaces_what_was_measured_and_nothing_that_people_wrote(tmp_path):
    path = tmp_path / "wire.md"
    record(path, "Wire", "one\n")
    path.write_text(path.read_text() + "\nWhat it means.\n")
    record(path, "Wire", "two\n")
    text = path.read_text()
    assert text.startswith("# Wire\n")
    assert "two" in text
    assert "one" not in text
    assert text.endswith("\nWhat it means.\n")
    path.write_text("# Wire\n\nA page of before.\n")
    with pytest.raises(SystemExit, match="put <!-- measured -->"):
        record(path, "Wire", "three\n")
