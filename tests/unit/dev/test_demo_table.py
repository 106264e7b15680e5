"""The demo shows the trainer's own table, and the pods that the coordinator does not know yet."""

import io
from types import SimpleNamespace

from rich.console import Console

from dev.console import tables
from dev.demo.table import line, render
from dev.demo.watch import Picture
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState


def picture(report, phase="Running"):
    def slot(index, incarnation, state, cause="", role="worker"):
        return SimpleNamespace(
            role=role, index=index, incarnation=incarnation, state=state, cause=cause, node="n1"
        )

    status = SimpleNamespace(
        phase=phase,
        finished=phase == "Succeeded",
        training=SimpleNamespace(step=1300, epoch=4),
        parameter_servers=SimpleNamespace(ready=1, desired=1),
        workers=SimpleNamespace(ready=1, desired=2),
        restarts=SimpleNamespace(disruptions=3),
        slots=[slot(0, 0, "Running", role="ps"), slot(0, 2, "Running"), slot(1, 4, "Pending", "NodeGone")],
    )
    return Picture(SimpleNamespace(metadata=SimpleNamespace(name="digits"), status=status), report=report)


def shown(report, width=140, phase="Running"):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(picture(report, phase), ["a node is reclaimed"], 12.0))
    return console.file.getvalue()


def test_table_shows_job_report_and_pods_without_report():
    worker = WorkerReport(slot=0, incarnation=2, state=WorkerState.ACTIVE, node="n1", steps=7)
    text = shown(StatusReport(job_uid="u", phase=Phase.TRAINING, step=1234, workers=(worker,)))
    for words in ("job Running: 1/1 parameter servers, 1/2 workers ready, 3 disruptions", "step 1,234",
                  "0-2", "ms/step", "worker 1-4  Pending (NodeGone)", "a node is reclaimed"):  # fmt: skip
        assert words in text
    assert "worker 0-2" not in text


def test_table_can_be_read_in_80_columns():
    """The node of each worker is the point."""
    workers = [
        WorkerReport(slot=slot, incarnation=2, state=WorkerState.ACTIVE, node=node, steps=12345, samples=395_040,
                     step_seconds=0.1213, compute_seconds=0.1198, input_seconds=0.0004, staleness=1.9)
        for slot, node in enumerate(["local-spot-1", "ip-10-0-1-23.eu-west-1.compute.internal"])
    ]  # fmt: skip
    rates = {"epochs_total": 25, "loss": 0.3, "samples_per_second": 4321.0, "remaining_seconds": 75}
    text = shown(
        StatusReport(job_uid="u", phase=Phase.TRAINING, step=12345, workers=tuple(workers), **rates), width=80
    )
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "local-spot-1 " in text
    assert "3 disruptions" in text
    assert not tables.soft_wrap
    assert "\ndata done " in text  # and not behind the bar
    for words in (
        "samples",
        "ms/step",
        "compute",
        "stale",
        "12,345",
        "395,040",
        "121.3",
        "4,321 samples/s",
        "1m15s",
    ):
        assert words in text
    pieces = [line.split() for line in text[text.index("1-2 ") :].splitlines()[:3]]
    assert "".join([pieces[0][2], pieces[1][0], pieces[2][0]]) == workers[1].node


def test_table_and_line_before_the_first_report():
    assert "waiting for the coordinator" in shown(None)
    assert line(picture(None)).endswith("3 disruptions; waiting for the coordinator")


def test_last_table_tells_of_a_job_that_has_ended_and_of_no_work():
    """It was the last report before the end: Finishing, with so many samples/s, and workers that are Active."""
    worker = WorkerReport(slot=0, incarnation=2, state=WorkerState.ACTIVE, node="n1", steps=7)
    rates = {
        "epochs_total": 4,
        "samples_per_second": 489.0,
        "remaining_seconds": 3,
        "messages": ("exporting",),
    }
    report = StatusReport(job_uid="u", phase=Phase.FINISHING, step=1234, workers=(worker,), **rates)
    text = shown(report, phase="Succeeded")
    for words in ("digits  Succeeded  epoch 4/4  step 1,300", "- samples/s"):
        assert words in text
    for words in ("Finishing", "489", "Active", "exporting", "ms/step"):
        assert words not in text
