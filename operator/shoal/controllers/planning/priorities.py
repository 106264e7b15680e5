"""The priority of a job among those that share pools: that of its workers, to which nodes are given.

Parameter servers often have a higher one, so that nobody takes them, and say nothing of the workers. A job that waits
for nodes has no worker whose pod would say it: so its template is asked, and what its PriorityClass is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from shoal.api.base import ObjectMeta, Status
from shoal.api.json_text import JsonText
from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Transport
from shoal.errors import Unavailable

PATH = "/apis/scheduling.k8s.io/v1/priorityclasses"
WAIT_SECONDS = 5.0
"""All plans wait for the answer."""


class _Class(Status):
    """The parts of scheduling.k8s.io/v1 PriorityClass that Shoal reads."""

    metadata: ObjectMeta
    value: int
    global_default: bool = False


class _List(Status):
    items: tuple[_Class, ...]


@dataclass(frozen=True)
class Priorities:
    """What PriorityClasses are worth, as admission gives it to new pods."""

    values: Mapping[str, int] = field(default_factory=dict)
    default: int = 0
    """Of pods that name none."""

    def of(self, job: TrainingJob, pods: Iterable[Pod]) -> int:
        """The priority of a job. `pods`: of its run.

        Of what is not known, such as a class that may not be read, pods say it, while there are any with this class.
        Never more than its workers have, while there are any: an edit of the template gives none of them another one,
        and a quota or policy may refuse all pods that would have it.
        """
        classes = {
            "worker": _named(job.spec.workers.template),
            "ps": _named(job.spec.parameter_servers.template),
        }
        named = classes["worker"]
        made = [(each.place.role, each) for each in pods if each.place]
        if (worth := self.values.get(named)) is None:
            said = (each.spec.priority for role, each in made if classes[role] == named)
            worth = max(said, default=0 if named else self.default)
        have = (each.spec.priority for role, each in made if role == "worker" and not each.ended)
        return min(worth, max(have, default=worth))


class PriorityClasses:
    """Reads them, and remembers them while they cannot be read."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known = Priorities()

    async def read(self) -> Priorities:
        """What they are worth now."""
        try:
            answer = await self._transport.request("GET", PATH, timeout=WAIT_SECONDS, urgent=True)
            if answer.ok:
                self._known = _priorities(_List.model_validate_json(answer.body))
        except (Unavailable, ValidationError):  # also of what a proxy says with a 200
            pass
        return self._known


def _named(template: JsonText) -> str:
    return (template.read().get("spec") or {}).get("priorityClassName") or ""


def _priorities(listed: _List) -> Priorities:
    values = {each.metadata.name: each.value for each in listed.items}
    return Priorities(values, min((each.value for each in listed.items if each.global_default), default=0))
