"""The demo's chart: speeds from steps, gaps, and drawing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dev.demo.chart import Moment, draw, speeds
from dev.demo.faults import Fault

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def moments(*steps: int | None) -> list[Moment]:
    return [Moment(BEGIN + timedelta(seconds=i), step, 3, 1) for i, step in enumerate(steps)]


def test_speed_is_mean_of_last_five_seconds() -> None:
    assert speeds(moments(*range(0, 80, 10)))[1:] == [10.0] * 7


def test_speed_is_unknown_while_coordinator_is_unreachable() -> None:
    found = speeds(moments(0, 10, None, None, 40))
    assert found == [None, 10.0, None, None, 10.0]


def test_speed_after_restored_server_is_not_negative() -> None:
    assert speeds(moments(100, 90)) == [None, 0.0]


@pytest.mark.parametrize("steps", [(), (1,), (None, None), (0, 50, None, 40, 90)])
def test_chart_is_drawn_for_any_moments(tmp_path: Path, steps: tuple[int | None, ...]) -> None:
    draw(tmp_path / "demo.png", moments(*steps), [Fault("parameter server killed", "ps", BEGIN)])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
