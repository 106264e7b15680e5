"""What goes into a pod: its `RuntimeConfig`, in the environment variable `SHOAL_CONFIG`."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from shoal_trainer.contract.message import Message
from shoal_trainer.contract.places import CONTROL_PORT, DATA_PORT, SECRET_DIR
from shoal_trainer.contract.stopping import StopAfter

BATCH_SIZE = 32
"""Samples of a step where nobody says it: Keras' own."""


class Role(StrEnum):
    """The role of a pod."""

    PS = "ps"
    WORKER = "worker"


class JobIdentity(Message):
    """A job and its run: a job that is deleted and applied again has another `uid`.

    `run`: the name of a run that continues under another uid; empty: the uid names it.
    """

    namespace: str
    name: str
    uid: str
    run: str = ""

    @property
    def run_id(self) -> str:
        """What identifies the run among those of the job."""
        return self.run or self.uid

    @property
    def prefix(self) -> str:
        """The folder of the run: all its files are under `<storage>/<prefix>/`."""
        return f"{self.namespace}/{self.name}/{self.run_id}"


class Staleness(Message):
    """The learning rate over n**p, p = 0, 1/2, 1, of the normal staleness n (`ps/damping.py`). `max`: bounded.

    `rounds`: whether workers wait for each other (`ps/rounds.py`) where pushes take little time.
    """

    max: int | None = None
    policy: Literal["Constant", "InverseSquareRoot", "Inverse"] = "InverseSquareRoot"
    rounds: bool = True


class SnapshotPolicy(Message):
    """The interval between snapshots, and how many are kept."""

    every_seconds: int = 60
    retain: int = 3


class InitialFrom(Message):
    """Another run to resume from."""

    uri: str
    weights_only: bool = False


class Shard(Message):
    """The address of a parameter server: the ClusterIP Service of the shard."""

    host: str
    data_port: int = DATA_PORT
    control_port: int = CONTROL_PORT


class AcceleratorBatch(Message):
    """The batch size of workers whose accelerator's name contains all words of `accelerator`; "CPU": no accelerator."""

    accelerator: str
    batch_size: int


class RuntimeConfig(Message):
    """The configuration of a pod, in the environment variable `SHOAL_CONFIG`.

    `index` is the slot of a worker or the shard of a parameter server; `incarnation` counts its pods, and is the epoch
    of a shard. It begins at `first_incarnation`, which is above those of an earlier job that had the same run.
    """

    job: JobIdentity
    role: Role
    index: int
    incarnation: int
    first_incarnation: int = 0
    parameter_servers: tuple[Shard, ...]
    entrypoint: str
    args: dict[str, JsonValue] = Field(default_factory=dict)
    code_digest: str = ""
    """Of the archive with the job's code in the storage (`code_name`); empty: it is in a ConfigMap or the image."""
    batch_size: int = BATCH_SIZE
    """Samples per step of a worker."""
    batch_sizes: tuple[AcceleratorBatch, ...] = ()
    """Batch sizes per accelerator: the first entry that matches replaces `batch_size`."""
    reference_batch_size: int | None = None
    """A push of this many samples has weight 1; None: `batch_size`."""
    stop_after: StopAfter = StopAfter(epochs=1)
    staleness: Staleness = Staleness()
    snapshot: SnapshotPolicy = SnapshotPolicy()
    storage_uri: str
    initial_from: InitialFrom | None = None
    secret_dir: str = SECRET_DIR
    bind_host: str = "0.0.0.0"  # the operator sets the pod's own address through the downward API
    data_tls: bool = False
    node_name: str = ""
    grace_seconds: float = 60.0
    """From SIGTERM until the pod is killed."""
    cores: float = 0.0
    """CPU cores of the node, if its pool says so: a limit of the node is not visible in a container. 0: unknown."""
