"""JSON logs: one object a line, with its traceback inside."""

from __future__ import annotations

import asyncio
import json
import logging

from shoal.process.log import JsonLines
from shoal.runtime.controller import Controller, Key
from shoal.runtime.metrics import Metrics


async def test_a_line_has_the_object_that_is_reconciled_in_fields() -> None:
    """Also a line of a task that the reconcile began, and no other one."""
    lines, done = list[dict[str, str]](), asyncio.Event()

    def log() -> None:
        record = logging.LogRecord("shoal.x", logging.INFO, "x.py", 1, "made a pod", (), None)
        lines.append(json.loads(JsonLines().format(record)))

    async def request() -> None:
        log()
        done.set()

    tasks = list[asyncio.Task[None]]()

    async def reconcile(_: Key) -> None:
        log()
        tasks.append(asyncio.create_task(request()))

    controller = Controller("trainingjob", reconcile, keys=list, metrics=Metrics())
    controller.lead()
    controller.wake(("team", "digits"))
    tasks.append(asyncio.create_task(controller.work()))
    await done.wait()
    log()
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    of_job = {"controller": "trainingjob", "namespace": "team", "name": "digits"}
    assert [each.items() >= of_job.items() for each in lines] == [True, True, False]
    assert not of_job.keys() & lines[2].keys()


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
