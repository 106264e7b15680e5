"""The trainer's runtime configuration, passed to a pod in one environment variable."""

from __future__ import annotations

from typing import NamedTuple

from shoal.api.labels import Place, RoleName
from shoal.api.training_job import TrainingJob
from shoal.manifests import names
from shoal_trainer.contract import (
    STORAGE_DIR,
    AcceleratorBatch,
    InitialFrom,
    JobIdentity,
    Role,
    RuntimeConfig,
    Shard,
    SnapshotPolicy,
    Staleness,
    StopAfter,
)

POD_IP_ENV = "SHOAL_POD_IP"
NODE_NAME_ENV = "SHOAL_NODE_NAME"


def storage_uri(job: TrainingJob) -> str:
    """The storage of the job's runs, as its pods see it."""
    return job.spec.storage.uri or f"file://{STORAGE_DIR}"


class OfPool(NamedTuple):
    """What a pod is told because of its pool."""

    cores: float = 0.0
    """Of a node; 0: the pool does not say."""
    batch_size: int | None = None
    """Of a worker, whatever the job says; None: as that says."""


def runtime_config(job: TrainingJob, place: Place, grace: float, pool: OfPool) -> RuntimeConfig:
    """The configuration of one pod. The kubelet fills in the pod's address and node (`$(NAME)`).

    `grace`: the pod's `terminationGracePeriodSeconds`.
    """
    training, servers = job.spec.training, job.spec.parameter_servers
    stop, begin = training.stop_after, training.initial_from
    return RuntimeConfig(
        job=JobIdentity(
            namespace=job.metadata.namespace,
            name=job.metadata.name,
            uid=job.metadata.uid,
            run=job.spec.storage.run or "",
        ),
        role=Role(place.role),
        index=place.index,
        incarnation=place.incarnation,
        first_incarnation=names.first_incarnation(job),
        parameter_servers=tuple(
            Shard(host=names.service_host(job, shard)) for shard in range(servers.replicas)
        ),
        entrypoint=training.entrypoint,
        args=training.args.read(),
        code_digest=(training.code.digest if training.code else None) or "",
        batch_size=pool.batch_size or training.batch_size,
        batch_sizes=tuple(
            AcceleratorBatch(accelerator=each.accelerator, batch_size=each.batch_size)
            for each in (training.batch_sizes if pool.batch_size is None else ())
        ),
        reference_batch_size=None if pool.batch_size is None else training.batch_size,
        stop_after=StopAfter(
            epochs=stop.epochs,
            steps=stop.steps,
            metric=stop.metric,
            value=stop.value,
            mode=stop.mode,
        ),
        staleness=Staleness(**training.staleness.model_dump()),
        snapshot=SnapshotPolicy(every_seconds=servers.snapshot.every_seconds, retain=servers.snapshot.retain),
        storage_uri=storage_uri(job),
        initial_from=InitialFrom(uri=begin.uri, weights_only=begin.weights_only) if begin else None,
        bind_host=f"$({POD_IP_ENV})",
        data_tls=training.data_tls,
        node_name=f"$({NODE_NAME_ENV})",
        grace_seconds=grace,
        cores=pool.cores,
    )


_INDEX, _INCARNATION = 2_147_480_011, 2_147_480_033  # larger than any, and found only there


class ConfigTemplate:
    """The configurations of one role and pool as text: they differ in index and incarnation only."""

    def __init__(self, job: TrainingJob, role: RoleName, grace: float, pool: OfPool) -> None:
        self._job, self._grace, self._pool = job, grace, pool
        text = as_environment(runtime_config(job, Place(role, _INDEX, _INCARNATION), grace, pool))
        unique = text.count(str(_INDEX)) == text.count(str(_INCARNATION)) == 1
        self._text = text if unique else None

    def of(self, place: Place) -> str:
        """The configuration of one pod."""
        if self._text is None:  # an argument of the user looks like a placeholder
            return as_environment(runtime_config(self._job, place, self._grace, self._pool))
        text = self._text.replace(str(_INDEX), str(place.index))
        return text.replace(str(_INCARNATION), str(place.incarnation))


def as_environment(config: RuntimeConfig) -> str:
    """JSON in which the kubelet expands only the pod's address and node, never a user's `$(NAME)`."""
    filled_by_kubelet = {"bind_host": config.bind_host, "node_name": config.node_name}
    blank = {name: f"\x00{name}\x00" for name in filled_by_kubelet}
    text = config.model_copy(update=blank).to_json().replace("$", "$$")
    for name, value in filled_by_kubelet.items():
        text = text.replace(f"\\u0000{name}\\u0000", value)
    return text
