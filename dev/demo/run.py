"""Run the demo, and clean up also after an error or Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

from rich.live import Live

from dev.audit import writes
from dev.commands import command, exports
from dev.console import console, say, step
from dev.demo.backend import Backend, choose
from dev.demo.chart import Moment, draw, moment
from dev.demo.figures import figures
from dev.demo.story import Story
from dev.demo.table import line, render
from dev.demo.watch import Picture, Watcher
from dev.errors import DevError
from dev.images import IMAGES
from dev.paths import ROOT
from shoal_trainer.run.watch import describe_data

MANIFEST = ROOT / "examples" / "digits.yaml"
RESULT = ROOT / "build" / "demo.json"
CHART = ROOT / "build" / "demo.png"
NAMESPACE, JOB = "default", "digits"
LOOK_SECONDS = 0.5
LIMIT_SECONDS = 900.0
VALUES = {
    "image.repository": IMAGES["operator"].reference.rsplit(":", 1)[0],
    "image.tag": "dev",
    "image.pullPolicy": "Never",
    "trainer.psImage": IMAGES["ps"].reference,
    # The worker image and one file. It is on the nodes, so that jobs of others run there, too.
    "trainer.workerImage": IMAGES["digits"].reference,
    "page.enabled": "true",
    # The operator runs on the node that is not reclaimed: the demo shows the job.
    r"nodeSelector.cloud\.google\.com/gke-provisioning": "standard",
}


def run() -> int:
    """Run the demo. Exit code: 0 if the job has succeeded after all three faults, 130 after Ctrl-C."""
    try:
        return _run()
    except KeyboardInterrupt:
        say("interrupted; the tools and images are kept for the next run")
        return 130


def _run() -> int:
    start = time.monotonic()
    backend = choose()
    backend.check()
    keep = os.environ.get("KEEP") == "1"
    with ended(backend, keep=keep), interruptible():
        seconds: dict[str, float] = {}
        backend.up()
        with step("helm install shoal"):
            install(backend)
        seconds["setUp"] = time.monotonic() - start
        watcher = Watcher(backend, NAMESPACE, JOB)
        moments: list[Moment] = []
        picture, story = _follow(backend, watcher, seconds, moments)
        model = _model(backend, watcher, picture)
        result = figures(
            picture, story.faults, list(writes(backend.audit_log)), watcher.first_pushes, model, seconds
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    draw(CHART, moments, story.faults)
    console.print_json(data=result)
    if picture.evidence is not None:
        say(f"data: {describe_data(picture.evidence)}")
    files = f"{RESULT.relative_to(ROOT)} and {CHART.relative_to(ROOT)}"
    say(f"written to {files}; the demo took {time.monotonic() - start:.0f} s")
    return 0 if picture.job.status.phase == "Succeeded" and story.complete else 1


def install(backend: Backend, chosen: Mapping[str, str] = VALUES) -> None:
    """Install the chart with the images of this checkout, and wait for it."""
    values = [
        word
        for name, value in chosen.items()
        for word in ("--set-string" if name.startswith("extraEnv") else "--set", f"{name}={value}")
    ]
    chart = str(ROOT / "charts" / "shoal")
    where = ["--namespace", "shoal-system", "--create-namespace"]
    command(
        "helm",
        "upgrade",
        "--install",
        "shoal",
        chart,
        *where,
        *values,
        "--wait",
        "--timeout",
        "3m",
        env=backend.env,
    )


def _follow(
    backend: Backend, watcher: Watcher, seconds: dict[str, float], moments: list[Moment]
) -> tuple[Picture, Story]:
    """Apply the job and watch it to its end. Fills `seconds` by phase, and `moments` with each observation.

    Raises:
        DevError: it failed, ended before the three faults, or exceeded the time limit.
    """
    command("kubectl", "--namespace", NAMESPACE, "apply", "-f", str(MANIFEST), env=backend.env)
    begin = time.monotonic()
    lines: list[str] = []

    def report(text: str) -> None:
        lines.append(f"{time.monotonic() - begin:5.0f} s  {text}")
        if not console.is_terminal:
            say(lines[-1])

    story = Story(backend, watcher, report)
    picture: Picture | None = None
    spoken = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            now = time.monotonic() - begin
            picture = watcher.look()
            moments.append(moment(picture, datetime.now(UTC)))
            phase = _phase(picture)
            seconds[phase] = seconds.get(phase, 0.0) + now - sum(seconds.get(p, 0.0) for p in _PHASES)
            if picture.job.status.finished:
                break
            story.advance(picture)
            if console.is_terminal:
                live.update(render(picture, lines, now), refresh=True)
            elif now - spoken >= 5:
                say(line(picture))
                spoken = now
            if now > LIMIT_SECONDS:
                raise DevError(f"The job had not ended after {LIMIT_SECONDS:.0f} s. {_state(watcher)}")
            time.sleep(LOOK_SECONDS)
    console.print(render(picture, lines, time.monotonic() - begin))
    if picture.job.status.phase != "Succeeded":
        raise DevError(f"The job ended as {picture.job.status.phase}. {_state(watcher)}")
    if len(story.faults) < 3:
        raise DevError(
            f"The job ended after {len(story.faults)} of 3 faults: it is too short for this machine. "
            "Raise training.stopAfter.epochs in examples/digits.yaml."
        )
    return picture, story


_PHASES = ("starting", "training", "finishing")


def _phase(picture: Picture) -> str:
    if picture.report is None:
        return "starting"
    return {"Training": "training", "Starting": "starting"}.get(picture.report.phase, "finishing")


def _state(watcher: Watcher) -> str:
    """The state of the job and its pods, for an error message."""
    try:
        description = watcher.kubectl("describe", "trainingjob", watcher.name)
        pods = watcher.kubectl("get", "pods", "-o", "wide")
    except (DevError, OSError) as error:
        return str(error)
    return f"Run with KEEP=1 to keep the cluster for inspection.\n{description[-4000:]}\n{pods}"


def _model(backend: Backend, watcher: Watcher, picture: Picture) -> str:
    """The path of the exported model, copied out of the cluster's volume if that can be read."""
    output = picture.job.status.output
    uri = output.uri if output else ""
    claim = picture.job.spec.storage.volume_claim
    if claim is None or not uri.startswith("file://"):
        return uri
    volume = watcher.kubectl("get", "pvc", claim.name, "-o", "jsonpath={.spec.volumeName}")
    path = watcher.kubectl("get", "pv", volume, "-o", "jsonpath={.spec.hostPath.path}")
    root = backend.folder_of_volume(path) if path else None
    relative = uri.removeprefix("file://").removeprefix("/var/run/shoal/storage").lstrip("/")
    source = root / relative if root else None
    if source is None or not source.exists():
        return uri
    target = RESULT.parent / "demo-model"
    shutil.rmtree(target, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.mkdir(parents=True)
        shutil.copy(source, target)
    return str(target.relative_to(ROOT))


@contextmanager
def ended(backend: Backend, *, keep: bool) -> Iterator[None]:
    """Remove the cluster at the end, also after an error."""
    try:
        yield
    finally:
        if keep:
            say("KEEP=1: the cluster is kept; `make demo-down` removes it. In a shell of yours:")
            print(exports(backend.env))  # on one line, however long
            forward = "kubectl --namespace shoal-system port-forward deploy/shoal 8082"
            say(f"the web page is at http://localhost:8082 while `{forward}` runs")
        else:
            with step("removing the cluster"):
                backend.down()


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
