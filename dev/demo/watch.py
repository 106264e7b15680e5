"""Observe the TrainingJob and its pods in the API server, and the coordinator's report at PS 0.

The status of the job has telemetry only every 30 s, so the demo polls the coordinator as the operator does: over TLS
with the certificate of the job, and a token derived from its key.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from dev.commands import command
from dev.demo.backend import Backend
from dev.errors import DevError
from shoal.api.training_job import TrainingJob
from shoal_trainer.contract import StatusReport, TerminationMessage, WorkerReport, status_token

Pod = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """One observation of the job. `report` is the coordinator's last report, which can be older than the rest."""

    job: TrainingJob
    pods: tuple[Pod, ...] = ()
    report: StatusReport | None = None
    fresh: bool = False
    """Whether the coordinator answered this time."""

    def pod(self, name: str) -> Pod | None:
        """A pod by name."""
        return next((p for p in self.pods if p["metadata"]["name"] == name), None)

    def role(self, role: str) -> list[Pod]:
        """The pods of a role (`ps`, `worker`) that run and are not terminating."""
        return [
            p
            for p in self.pods
            if p["metadata"]["labels"].get("shoal.dev/role") == role
            and p["status"].get("phase") == "Running"
            and not p["metadata"].get("deletionTimestamp")
        ]

    @property
    def pushing(self) -> list[WorkerReport]:
        """The workers whose gradients arrive, as the coordinator says now."""
        workers = self.report.workers if self.report and self.fresh else ()
        return [w for w in workers if w.state == "Active" and w.first_push_at is not None]

    @property
    def evidence(self) -> TerminationMessage | None:
        """The termination message of PS 0."""
        for pod in self.pods:
            for status in pod["status"].get("containerStatuses", []):
                end = status["state"].get("terminated") or {}
                if end.get("exitCode") == 0 and pod["metadata"]["labels"].get("shoal.dev/role") == "ps":
                    with contextlib.suppress(ValueError):
                        return TerminationMessage.model_validate_json(end.get("message") or "")
        return None


@dataclass
class Watcher:
    """Observes one job. `first_pushes`: Unix seconds by (slot, incarnation), as reported by the coordinator."""

    backend: Backend
    namespace: str
    name: str
    first_pushes: dict[tuple[int, int], float] = field(default_factory=dict)
    _credentials: dict[str, tuple[str, str]] = field(default_factory=dict)
    _report: StatusReport | None = None

    def look(self) -> Picture:
        """Observe the job.

        Raises:
            DevError: the API server does not know the job, or does not answer.
        """
        job = TrainingJob.model_validate_json(self.kubectl("get", "trainingjob", self.name, "-o", "json"))
        selector = f"shoal.dev/job={self.name}"
        pods = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        picture = Picture(job, tuple(pods))
        report = self.ask(picture)
        if report:
            self._report = report
            for worker in report.workers:
                if worker.first_push_at is not None:
                    self.first_pushes.setdefault((worker.slot, worker.incarnation), worker.first_push_at)
        return Picture(job, tuple(pods), self._report, fresh=report is not None)

    def kubectl(self, *args: str) -> str:
        """Kubectl in the job's namespace."""
        return command("kubectl", "--namespace", self.namespace, *args, env=self.backend.env, timeout=60)

    def ask(self, picture: Picture) -> StatusReport | None:
        """What the coordinator says now, without the API server; `picture`: where it runs. None: it does not answer."""
        servers = [p for p in picture.role("ps") if p["metadata"]["labels"].get("shoal.dev/index") == "0"]
        if not servers:
            return None
        try:
            token, certificate = self._credential(picture.job.metadata.uid)
            return StatusReport.model_validate_json(self.backend.ask(servers[0], token, certificate))
        except (DevError, OSError, ValueError, LookupError):
            return None

    def _credential(self, uid: str) -> tuple[str, str]:
        """The bearer token and the certificate of a run, from its Secret."""
        if uid not in self._credentials:
            found = json.loads(self.kubectl("get", "secrets", "-l", f"shoal.dev/job-uid={uid}", "-o", "json"))
            data = {key: base64.b64decode(value) for key, value in found["items"][0]["data"].items()}
            self._credentials[uid] = status_token(data["key"]), data["tls.crt"].decode()
        return self._credentials[uid]
