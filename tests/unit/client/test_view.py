"""A job as it is shown in a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from shoal.client.view import follow_view
from tests.unit.policy.build import NOW, job


def test_each_part_of_a_job_is_on_a_line_of_its_own() -> None:
    status = {"phase": "Running", "training": {"step": 1204, "progressPercent": 62}, "data": {"done": 7}}
    console = Console(file=io.StringIO(), width=100)
    console.print(follow_view(job(status=status), now=NOW))
    assert isinstance(console.file, io.StringIO)
    head, bar, data, *_ = console.file.getvalue().splitlines()
    assert "step 1,204" in head
    assert set(bar.rstrip()) <= set("━╸╺ ")
    assert data.startswith("data done 7")
