"""A job as it is shown in a terminal."""

from __future__ import annotations

import io
import unicodedata
from datetime import timedelta

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.client.view import follow_view, job_table, one_line, plain_console, why
from tests.unit.policy.build import NOW, job, stamp


def test_each_part_of_a_job_is_on_a_line_of_its_own() -> None:
    status = {"phase": "Running", "training": {"step": 1204, "progressPercent": 62}, "data": {"done": 7}}
    console = Console(file=io.StringIO(), width=100)
    console.print(follow_view(job(status=status), now=NOW))
    assert isinstance(console.file, io.StringIO)
    head, bar, data, *_ = console.file.getvalue().splitlines()
    assert "step 1,204" in head
    assert set(bar.rstrip()) <= set("━╸╺ ")
    assert data.startswith("data done 7")


def test_a_small_loss_is_not_shown_as_zero() -> None:
    """One of 4e-7 would look like the end of training."""
    small = job(
        status={"phase": "Running", "training": {"step": 9, "loss": "4.21e-7", "metrics": {"mae": "0.25"}}}
    )
    shown = plain_console(width=200)
    with shown.capture() as out:
        shown.print(follow_view(small, now=NOW), job_table([small], now=NOW))
    assert "loss 4.2100e-07" in out.get()
    assert "mae 0.2500" in out.get()
    assert out.get().count("4.2100e-07") == 2


def test_before_the_first_step_there_are_no_numbers() -> None:
    of = job(status={"phase": "Starting", "workers": {"desired": 3}, "training": {"step": 0}})
    console = Console(file=io.StringIO(), width=100)
    console.print(follow_view(of, now=NOW))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[0].split() == ["digits", "Starting"]
    assert "data done" not in console.file.getvalue()
    assert one_line(of, now=NOW) == "digits Starting, workers 0/3"


def test_output_that_is_no_terminal_says_what_the_workers_wait_for() -> None:
    waits = "worker 0-1: export: cannot write s3://runs/model.keras: Access Denied; retrying"
    of = job(status={"phase": "Running", "training": {"step": 9, "message": waits}})
    assert one_line(of, now=NOW).endswith(f"step 9: {waits}")


def test_words_of_pods_do_not_reach_the_terminal_as_commands() -> None:
    """A title, the clipboard (OSC 52), a cleared screen; also as C1 controls."""
    evil = "\x1b]0;owned\x1b\\\x1b]52;c;Y3VybA==\x07\x1b[2J\x9b1;1Hall is well\r"
    condition = {"type": "Failed", "status": "True", "reason": "UserError", "message": evil}
    status = {
        "phase": "Failed",
        "reason": "UserError",
        "conditions": [{**condition, "lastTransitionTime": stamp(NOW)}],
        "training": {"message": evil, "step": 1},
    }
    of = job(status=status)
    for shown in (
        follow_view(of, now=NOW),
        job_table([of], now=NOW),
        one_line(of, now=NOW),
        Text(evil),
        evil,
    ):
        console = plain_console(200, io.StringIO())
        console.print(shown)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert not [each for each in text if unicodedata.category(each) == "Cc" and each != "\n"]
    assert "all is well" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("name", ["digits-3fa2c1", "bert-base-uncased-finetune-lr3e-5-3fa2c1"])
def test_names_are_whole_in_every_terminal(width: int, name: str) -> None:
    """One that is cut cannot be given to the next command: of what has no room, the least needed is left out."""
    status = {
        "phase": "Running",
        "reason": "Unschedulable",
        "workers": {"desired": 16, "ready": 16},
        "training": {
            "step": 9,
            "loss": "0.2113",
            "samplesPerSecond": "10856.2",
            "progressPercent": 62,
            "remainingSeconds": 10**5,
        },
        "cost": {"accumulated": "12.34", "perHour": "1.2", "savedVersusOnDemand": "3"},
    }
    of = job(status=status)
    of = of.model_copy(
        update={"metadata": of.metadata.model_copy(update={"name": name, "namespace": "n" * 63})}
    )
    text = {
        namespaces: printed(width, job_table([of], namespaces=namespaces, now=NOW))
        for namespaces in (False, True)
    }
    assert "…" not in "".join(text.values())
    if width >= 80:
        head, row = text[False].splitlines()
        assert head.split()[:3] == ["NAME", "PHASE", "WORKERS"]
        assert row.split()[:3] == [name, "Running", "16/16"]
        assert "SAMPLES/S" in head or width < 100
        assert "SPENT" in head or width < 200


def printed(width: int, table: Table) -> str:
    file = io.StringIO()
    plain_console(width, file).print(table)
    return file.getvalue()


def test_disruptions_are_those_that_kubectl_shows() -> None:
    """Beside samples that are lost, a loss of pods would be the same word for something else."""
    of = job(status={"phase": "Running", "restarts": {"disruptions": 3}, "parameterServers": {"restarts": 9}})
    console = Console(file=io.StringIO(), width=200)
    console.print(job_table([of], now=NOW))
    assert isinstance(console.file, io.StringIO)
    head, row = console.file.getvalue().splitlines()
    assert dict(zip(head.split(), row.split(), strict=False))["DISRUPTIONS"] == "3"
    assert "LOST" not in head


@pytest.mark.parametrize(("minutes", "told"), [(1, False), (9, True)])
def test_a_status_that_stands_is_said_to_be_old(minutes: int, told: bool) -> None:
    """After `helm uninstall` it says Running, so many samples/s, for pods that may be gone."""
    training = {"step": 9, "lastProgressTime": stamp(NOW - timedelta(minutes=minutes))}
    of = job(status={"phase": "Running", "training": training})
    console = Console(file=io.StringIO(), width=250)
    console.print(follow_view(of, now=NOW), job_table([of], now=NOW))
    assert isinstance(console.file, io.StringIO)
    words = f"no step is known for {minutes}m00s: shoal doctor says whether an operator runs"
    assert console.file.getvalue().count(words) == 2 * told


@pytest.mark.parametrize(
    ("resumed", "lost", "told"),
    [(100, 900, ""), (240, 35, "no step is known for 4m00s, since it was resumed"),
     (240, 900, "no step is known for 4m00s, since it was resumed: shoal doctor says whether an operator runs")],
)  # fmt: skip
def test_a_pause_is_no_standing_still(resumed: int, lost: int, told: str) -> None:
    """And who writes what happened a moment ago is not said to be away."""

    def ago(seconds: int) -> str:
        return stamp(NOW - timedelta(seconds=seconds))

    pause = {"type": "Suspended", "status": "False", "reason": "Resumed", "lastTransitionTime": ago(resumed)}
    status = {
        "phase": "Running",
        "conditions": [pause],
        "slots": [{"index": 0, "state": "Starting", "createdAt": ago(lost)}],
        "training": {"step": 9, "lastProgressTime": ago(3600)},
    }
    assert why(job(status=status).status, NOW, short=True) == told


def test_what_a_job_waits_for_is_above_its_pods_and_those_that_do_not_run_are_first() -> None:
    """A live table shows as much as the terminal has lines: of 200 workers the first forty, and no reason."""
    condition = {"type": "Degraded", "status": "True", "reason": "SnapshotsFail", "message": "AccessDenied"}
    slots = [{"role": "worker", "index": index} for index in range(200)]
    slots[150] |= {"state": "Silent"}
    slots[170] |= {"cause": "NodeShutdown"}
    status = {
        "phase": "Running",
        "reason": "SnapshotsFail",
        "conditions": [condition | {"lastTransitionTime": stamp(NOW)}],
        "slots": [*slots, {"role": "ps", "index": 0}],
        "training": {"step": 9, "message": "worker 3-0: cannot read part-0007.tfrecord"},
    }
    console = plain_console(120, io.StringIO())
    console.print(follow_view(job(status=status), now=NOW))
    shown = console.file.getvalue()
    words = [
        "AccessDenied",
        "part-0007",
        "POD",
        "worker 150-0",
        "worker 170-0",
        "ps 0-0",
        "worker 0-0",
        "worker 199-0",
    ]
    places = [shown.index(each) for each in words]
    assert places == sorted(places)


def test_a_thousand_pods_are_as_many_rows_as_there_are_lines() -> None:
    """Twice a second: those that no terminal shows would take most of a core."""
    slots = [{"role": "worker", "index": i, "incarnation": 0, "state": "Running"} for i in range(1000)]
    slots[777] |= {"state": "Silent"}
    view = follow_view(job(status={"phase": "Running", "slots": slots}), now=NOW, most=40)
    console = Console(file=io.StringIO(), width=100)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    shown = [line for line in console.file.getvalue().splitlines() if line.startswith("worker")]
    assert len(shown) == 40
    assert "777-0" in shown[0]
