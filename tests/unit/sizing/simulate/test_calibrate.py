"""Promises are replayed on what was left out of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shoal.cli import main
from shoal.errors import UsageError
from shoal.sizing.plan import Pool
from shoal.sizing.simulate.calibrate import Calibration, Cell, _interval, calibrate
from shoal.sizing.simulate.traces import Trace, read_trace

ROOT = Path(__file__).parents[4]
TRACES = ROOT / "tests" / "data" / "traces"
SPOT = Pool("spot", 16, 0.5, 0.1, 128, startup_seconds=170, interruptions_per_hour=0.1)
STEADY = Pool("steady", 16, 1.5, 0.1, 128, spot=False, startup_seconds=150)


def few(*traces: Trace) -> Calibration:
    return calibrate(SPOT, STEADY, traces, hours=(0.5, 1.0), numbers=(8,))


@pytest.mark.nightly
def test_promises_are_kept_on_the_recorded_traces() -> None:
    found = few(*(read_trace(path) for path in sorted(TRACES.glob("*.csv"))))
    assert found.promised == 0.95
    assert 0.92 <= found.kept <= 0.98  # the page has all 108 cells: 93 to 97 %
    assert found.low <= found.kept <= found.high
    assert len({cell.trace for cell in found.cells}) == 3


def test_blocks_are_drawn_anew_by_their_number() -> None:
    """Also where one before them was left out, since no work could be promised."""
    good, bad, other = (
        Cell("a", 8, 0, 3600.0, 1.2, 0.95, kept, 2, ((block, kept, 2),))
        for block, kept in ((4, 1.0), (4, 0.0), (5, 0.0))
    )
    assert _interval([good, bad], 0) == (0.5, 0.5)
    assert _interval([good, other], 0) == (0.0, 1.0)


@pytest.mark.nightly
def test_pool_that_never_lacks_nodes_is_promised_almost_all_of_its_work() -> None:
    always = Trace("always", np.zeros(16), np.full(16, np.inf), 20 * 3600.0)
    found = few(always)
    assert found.kept == 1
    pure = [cell for cell in found.cells if cell.on_demand == 0 and cell.seconds == 3600]
    assert [cell.slack for cell in pure] == [pytest.approx(1.05, abs=0.06)]


def test_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="give one of at least 720 s"):
        few(Trace("short", np.zeros(4), np.full(4, np.inf), 300.0))
    with pytest.raises(UsageError, match="too short for any plan"):
        few(Trace("short", np.zeros(4), np.full(4, np.inf), 1000.0))


def _command() -> list[str]:
    sizing = ROOT / "examples" / "sizing"
    return [
        "calibrate", "-f", str(sizing / "job.yaml"), "--pools", str(sizing / "pools.yaml"), "--profiles",
        str(sizing / "profiles.yaml"), "--trace", str(TRACES / "aws-p3-2xlarge-32-nodes.csv"),
    ]  # fmt: skip


@pytest.mark.parametrize("confidence", ["0.4", "0.9995", "0.999999", "1", "nan"])
def test_what_the_runs_cannot_promise_is_refused(confidence: str) -> None:
    """It was tried for minutes, and shown as 100%."""
    result = CliRunner().invoke(main, [*_command(), "--confidence", confidence])
    assert result.exit_code == 2
    assert "at least 0.5 and at most 0.999" in " ".join(result.output.split())


@pytest.mark.nightly
def test_command_prints_cells_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shoal.sizing.simulate import calibrate as module

    less = {"hours": (1.0,), "numbers": (8,)}
    monkeypatch.setattr(module.calibrate, "__kwdefaults__", module.calibrate.__kwdefaults__ | less)
    arguments = _command()
    picture = tmp_path / "kept.png"
    result = CliRunner().invoke(main, [*arguments, "--json", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert {"promised", "kept", "low", "high", "cells"} <= answer.keys()
    assert {"trace", "workers", "slack", "promised", "kept", "n"} <= answer["cells"][0].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(main, arguments)
    assert "each promised 95%" in shown.output
