"""The demo shows the trainer's own table, and the pods that the coordinator does not know yet."""

import io
from types import SimpleNamespace

from rich.console import Console

from dev.demo.table import line, render
from dev.demo.watch import Picture
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState


def picture(report):
    def slot(index, incarnation, state, cause="", role="worker"):
        return SimpleNamespace(
            role=role, index=index, incarnation=incarnation, state=state, cause=cause, node="n1"
        )

    status = SimpleNamespace(
        phase="Running",
        parameter_servers=SimpleNamespace(ready=1, desired=1),
        workers=SimpleNamespace(ready=1, desired=2),
        restarts=SimpleNamespace(disruptions=3),
        slots=[slot(0, 0, "Running", role="ps"), slot(0, 2, "Running"), slot(1, 4, "Pending", "NodeGone")],
    )
    return Picture(SimpleNamespace(metadata=SimpleNamespace(name="digits"), status=status), report=report)


def shown(report, **options):
    console = Console(file=io.StringIO(), width=140)
    console.print(render(picture(report), ["a node is reclaimed"], 12.0))
    return console.file.getvalue()


def test_table_shows_job_report_and_pods_without_report():
    worker = WorkerReport(slot=0, incarnation=2, state=WorkerState.ACTIVE, node="n1", steps=7)
    text = shown(StatusReport(job_uid="u", phase=Phase.TRAINING, step=1234, workers=(worker,)))
    for words in ("TrainingJob Running: 1/1 parameter servers ready, 1/2 workers ready, 3 disruptions", "step 1,234",
                  "0-2", "ms/step", "worker 1-4  Pending (NodeGone)", "a node is reclaimed"):  # fmt: skip
        assert words in text
    assert "worker 0-2" not in text


def test_table_and_line_before_the_first_report():
    assert "waiting for the coordinator" in shown(None)
    assert line(picture(None)).endswith("3 disruptions; waiting for the coordinator")
