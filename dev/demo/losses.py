"""The story of the losses: examples/digits.yaml while a node is reclaimed, its parameter server killed, a node lost."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dev.audit import writes
from dev.demo.backend import Backend
from dev.demo.chart import Moment, draw, moment
from dev.demo.faults import Faults
from dev.demo.figures import figures
from dev.demo.table import line
from dev.demo.tell import NAMESPACE, VALUES, Stage, Told
from dev.demo.watch import Picture, Watcher
from dev.errors import DevError
from dev.paths import ROOT
from shoal_trainer.run.watch import describe_data

MANIFEST = ROOT / "examples" / "digits.yaml"
JOB = "digits"
MODEL = ROOT / "build" / "demo-model"
LIMIT_SECONDS = 900.0
TOO_SHORT = "it is too short for this machine. Raise training.stopAfter.epochs in examples/digits.yaml."


def losses(stage: Stage) -> Told:
    """Apply the job, and take its machines: each after the job has recovered from the loss before."""
    stage.backend.up()
    # The operator runs on the node that is not reclaimed: the demo shows the job.
    stage.install(VALUES | {r"nodeSelector.cloud\.google\.com/gke-provisioning": "standard"})
    stage.apply(MANIFEST)
    watcher = Watcher(stage.backend, NAMESPACE, JOB)
    script = Faults(stage.backend, watcher, stage.report)
    moments: list[Moment] = []

    def advance(picture: Picture) -> None:
        moments.append(moment(picture, datetime.now(UTC)))
        stage.part(_phase(picture))
        if not picture.job.status.finished:
            script.advance(picture)

    picture = stage.follow(watcher, advance, line, LIMIT_SECONDS)
    if not script.complete:
        raise DevError(f"The job ended after {len(script.faults)} of 3 faults: {TOO_SHORT}")
    log, model = list(writes(stage.backend.audit_log)), _model(stage.backend, watcher, picture)
    found = figures(picture, script.faults, log, watcher.first_pushes, model)
    return Told(found, lambda path: draw(path, moments, script.faults), words=_words(picture, found))


def _words(picture: Picture, found: Mapping[str, Any]) -> Sequence[str]:
    words = [] if picture.evidence is None else [f"data: {describe_data(picture.evidence)}"]
    if found["silenceToReplacementSeconds"] is None:
        words.append(f"fault 3: the job ended before its worker was replaced; {TOO_SHORT}")
    return words


def _phase(picture: Picture) -> str:
    if picture.report is None:
        return "starting"
    return {"Training": "training", "Starting": "starting"}.get(picture.report.phase, "finishing")


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
    if source is None or not source.is_dir():
        return uri
    shutil.rmtree(MODEL, ignore_errors=True)
    shutil.copytree(source, MODEL)
    return str(MODEL.relative_to(ROOT))
