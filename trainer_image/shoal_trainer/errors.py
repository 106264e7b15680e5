"""The errors that the trainer raises.

```
TrainerError
├── UserError       the user's code or configuration is wrong; the message says what to change; the process exits 2
│   └── BadName         the storage cannot have a file of this name: no retry mends it
├── ProtocolError   a peer violated the protocol; the connection is closed
│   └── Unauthorized  a peer could not prove that it belongs to this job
├── Fenced          a newer incarnation has replaced this process: stop, write nothing
│   └── RunTaken      one of another job has: the process exits as by a UserError
├── Overtaken       another worker has the task now: drop it
├── WorkerFailed    this worker cannot go on, but another one may: end with the reason, and be replaced
│   ├── NoAccelerator  the pod was promised a GPU and sees none
│   ├── FaultyDevice   its gradients are not finite, and those of the other workers are
│   ├── OutOfMemory    a step or a task does not fit into the memory of this worker
│   ├── DiskFull       the disk of this worker, or of its node, is full
│   ├── CallbackOutage  a callback of the user did not reach what it talks to
│   └── HungStep       a step or a task does not end
├── Interrupted     SIGTERM arrived during a task: leave without its result
├── Unreachable     a peer or the storage does not answer; callers retry
│   ├── TooSlow       a peer keeps the connection open but misses the deadline
│   └── Outrun        snapshots are removed faster than this process reads one
└── SnapshotError   a snapshot is absent, incomplete or corrupt
```
"""

from __future__ import annotations

import errno

NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
"""A disk is full."""


class TrainerError(Exception):
    """The base class."""


class UserError(TrainerError):
    """The user's code or configuration is wrong. The message says what to change."""


class BadName(UserError):
    """The storage cannot have a file of this name, such as one that is too long: a retry mends nothing."""


class ProtocolError(TrainerError):
    """A peer violated the protocol."""


class OtherVersion(ProtocolError):
    """A peer speaks another version of the data plane."""

    def __init__(self, version: int, own: int) -> None:
        super().__init__(
            f"the peer uses version {version} of the data plane, this process version {own}: workers and parameter "
            "servers of a job need images of the same version of Shoal. Suspend the job, name the images of both "
            "roles in its templates, and resume it"
        )
        self.version = version


class Unauthorized(ProtocolError):
    """A peer could not prove that it belongs to this job."""


class Fenced(TrainerError):
    """A newer incarnation has replaced this process."""


class RunTaken(Fenced):
    """Another job uses this run, such as one of the same name in another cluster. The message says what to change."""


class Overtaken(TrainerError):
    """Another worker has the task now."""


class WorkerFailed(TrainerError):
    """This worker cannot go on, but another one may: it ends, and its replacement is tried on another node.

    The names of its subclasses are in `contract.FAILURE_REASONS`.
    """


class NoAccelerator(WorkerFailed):
    """The pod was promised an accelerator, and TensorFlow sees none."""


class FaultyDevice(WorkerFailed):
    """The gradients of this worker are not finite, and those of the other workers are."""


class OutOfMemory(WorkerFailed):
    """A step or a task does not fit into the memory of this worker, or of its accelerator."""


class DiskFull(WorkerFailed):
    """The disk of this worker, or of its node, is full."""


class CallbackOutage(WorkerFailed):
    """A callback of the user met an outage of the network, such as of the server that it reports to."""


class HungStep(WorkerFailed):
    """A training step or a task does not end."""


class Interrupted(TrainerError):
    """SIGTERM arrived during a task."""


class Unreachable(TrainerError):
    """A peer or the storage does not answer."""


class TooSlow(Unreachable):
    """A peer keeps the connection open but misses the deadline."""


class Outrun(Unreachable):
    """A run removes its snapshots faster than this process reads one."""


class SnapshotError(TrainerError):
    """A snapshot is absent, incomplete or corrupt."""


class OtherFormat(SnapshotError):
    """A snapshot is whole, but of a version of Shoal that writes what this one cannot read."""


def has_no_room(error: BaseException) -> bool:
    """Whether a disk is full (`DiskFull`), as Python says it, or HDF5 and TensorFlow in words."""
    words = ("No space left on device", "Disk quota exceeded")
    number = error.errno if isinstance(error, OSError) else None
    return number in NO_ROOM or any(text in str(error) for text in words)
