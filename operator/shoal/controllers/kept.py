"""What the caches keep of an object: what the operator reads, and no more of it than an honest one has.

Whoever may write an object may make it as large as etcd takes, 1.5 MiB, and there may be thousands. What belongs to
Kubernetes is cut where it is parsed (`api.kube`, `api.kueue`), and the templates and arguments of jobs are text
(`api.json_text`). The rest of this operator's own kinds is bounded by their schemas, but for their metadata. Users see
the whole, through clients, which have the same models.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

from shoal.api.capacity_pool import CapacityPool
from shoal.api.json_text import NOTHING
from shoal.api.kube import Node
from shoal.api.kueue import ResourceFlavor
from shoal.api.labels import MADE_BY, SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.manifests.names import PRIORITY_CLASS

R = TypeVar("R", TrainingJob, CapacityPool, SpeedProfile, Node, ResourceFlavor)

MOST_LABELS = 512
"""Of a node: it is found by any of them. With feature discovery it has 200."""
LONGEST = 253
"""Characters of a name, and of a label's value: an annotation that names something has no more."""


def kept(new: R) -> R:
    """The object, with what is read of its metadata; and nothing of the making of pods of somebody else's job."""
    meta = new.metadata
    if isinstance(new, Node):
        labels = meta.labels
        if len(labels) > MOST_LABELS:
            labels = dict(islice(labels.items(), MOST_LABELS))
    else:
        labels = _named(meta.labels, (PRIORITY_CLASS, MADE_BY))
    read = {
        "labels": labels,
        "annotations": _named(meta.annotations, (SPEED_PROFILE,)),
        "finalizers": (),
    }
    change: dict[str, object] = {"metadata": meta.model_copy(update=read)}
    if isinstance(new, TrainingJob) and not new.spec.ours:
        change["spec"] = _without_pods(new)
    return new.model_copy(update=change)


def _named(found: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name in names if (value := found.get(name)) is not None and len(value) <= LONGEST}


def _without_pods(job: TrainingJob) -> object:
    spec, bare = job.spec, {"template": NOTHING}
    return spec.model_copy(
        update={
            "training": spec.training.model_copy(update={"args": NOTHING}),
            "parameter_servers": spec.parameter_servers.model_copy(update=bare),
            "workers": spec.workers.model_copy(update=bare),
        }
    )


def with_known_parts(old: TrainingJob | None, new: TrainingJob) -> TrainingJob:
    """A job whose parts that have not changed are those of its earlier state.

    Of the records, plans visit only others; and what was derived from the spec, such as the digest of a template, is
    known after each write of a status.
    """
    if old is None:
        return new
    spec = old.spec if old.metadata.generation == new.metadata.generation else new.spec
    known = {(slot.role, slot.index, slot.incarnation): slot for slot in old.status.slots}
    slots = tuple(
        same if (same := known.get((slot.role, slot.index, slot.incarnation))) == slot else slot
        for slot in new.status.slots
    )
    return new.model_copy(update={"spec": spec, "status": new.status.model_copy(update={"slots": slots})})
