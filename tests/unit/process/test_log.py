"""JSON logs: one object a line, with its traceback inside."""

from __future__ import annotations

import json
import logging

from shoal.process.log import JsonLines


def test_a_line_is_one_object_with_what_collectors_read() -> None:
    try:
        raise ValueError("no such")
    except ValueError as error:
        record = logging.LogRecord("shoal.x", logging.ERROR, "x.py", 1, "job %s\nfailed", ("a",), None)
        record.exc_info = (type(error), error, error.__traceback__)
    record.created = 1_700_000_000.25
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("exception").endswith("ValueError: no such")
    assert found == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "severity": "ERROR",
        "logger": "shoal.x",
        "message": "job a\nfailed",
    }
