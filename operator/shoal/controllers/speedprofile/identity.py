"""Which SpeedProfile is a job's: that of its model, at one size of its input.

Its annotation names it; or a user wrote one for this model; or the operator makes it, under a name that follows from
the model, so that all jobs of it find the same one. What is of another kind is never mixed in, whoever names it.
"""

from __future__ import annotations

from hashlib import sha256

from shoal.api.labels import SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.controllers.speedprofile.learn import kind_of
from shoal.sizing.speed.measurements import Kind


def profile_name(fingerprint: str, kind: Kind | None = None) -> str:
    """The name of the profile that the operator makes for a model; that of another kind of it than the first one's.

    A profile for each, since an earlier version finds the rows of each in the form that it knows, and keeps them.
    """
    first = f"model-{fingerprint[:16].lower()}"
    if kind is None:
        return first
    return f"{first}-{sha256(f'{round(kind.sizes)} {kind.precision}'.encode()).hexdigest()[:8]}"


def is_of(profile: SpeedProfile, kind: Kind) -> bool:
    """Whether nothing in it says that it is of another kind. The FLOPs of a spec are a user's, of any convention."""
    said = Kind(profile.spec.model.fingerprint if profile.spec.model is not None else "")
    return said.alike(kind) and kind_of(profile.status.model).alike(kind)


def chosen(job: TrainingJob, kind: Kind, profiles: Cache[SpeedProfile]) -> str:
    """The profile of a job that trains this kind of model. Before it has reported it, the annotated one is believed."""
    namespace = job.metadata.namespace
    named = job.metadata.annotations.get(SPEED_PROFILE, "")
    if named:
        known = profiles.get(named, namespace)
        if known is None or kind.fingerprint == "" or is_of(known, kind):
            return named
    for each in profiles.indexed("described", (namespace, kind.fingerprint)):
        if is_of(each, kind):
            return each.metadata.name
    first, own = profile_name(kind.fingerprint), profile_name(kind.fingerprint, kind)
    stored = profiles.get(first, namespace)
    taken = stored is not None and not is_of(stored, kind)
    return own if taken or profiles.get(own, namespace) is not None else first
