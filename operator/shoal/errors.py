"""The exceptions of Shoal.

```
ShoalError
├── UsageError         bad input that the caller can fix: a file, a flag, a value. The command line exits with 2
│   └── NotEnoughData  fewer measurements than a fit needs
├── Interrupted        a long computation is given up for what came meanwhile
├── ScalingError       the target of a node pool cannot be read or sized
│   ├── SizedByOther   someone else sets its size
│   └── Busy           it is being changed, or has changed since it was read: soon again
├── StoreWentBack      the API server's store is older than it was: only a new process knows nothing of what never was
└── ClusterError       the API server refused a request or is unreachable
    ├── NotFound       there is no such object
    ├── Refused        the API server rejects this object (400, 422): terminal until the object changes
    │   └── Forbidden  it does not know this user, or does not let them (401, 403)
    ├── Unavailable    no answer, or one that may differ on retry
    │   └── TooLong    the answer has more bytes than are read: less may be asked for
    └── LeaseLost      this process may no longer be the leader: nothing may be written
```
"""


class ShoalError(Exception):
    """Base class of all errors of Shoal."""


class UsageError(ShoalError, ValueError):
    """Bad input. The message says what to change."""


class NotEnoughData(UsageError):
    """Fewer measurements than a fit needs."""


class Interrupted(ShoalError):
    """A long computation is given up for what came meanwhile. The message says how far it was."""


class ScalingError(ShoalError):
    """The target of a node pool cannot be read or sized. `reason`: why, in one word; the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SizedByOther(ScalingError):
    """Someone else sets the target's size."""


class Busy(ScalingError):
    """The target is being changed, or has changed since it was read."""


class ClusterError(ShoalError):
    """The API server refused a request or is unreachable."""


class NotFound(ClusterError):
    """There is no such object, or it is gone."""


class Refused(ClusterError):
    """The API server rejects this object (400, 422)."""


class Forbidden(Refused):
    """The API server does not know this user, or does not let them do that (401, 403)."""


class Unavailable(ClusterError):
    """No answer from the API server, or one that may differ on retry.

    `retry_after`: seconds that the server asks to wait (its header Retry-After), if it does. `of_one`: with this
    request, since an object or a resource is what is not ready; otherwise with all.
    """

    def __init__(self, message: str, retry_after: float | None = None, *, of_one: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.of_one = of_one


class TooLong(Unavailable):
    """An answer has more bytes than are read. Of a list, fewer objects may be asked for."""


class Expired(ClusterError):
    """The API server no longer knows the resource version, or the page of a list: 410 Gone."""


class StoreWentBack(ShoalError):
    """The API server's store is older than it was, as after etcd is restored from a backup."""


class LeaseLost(ClusterError):
    """Another process may be the leader: nothing may be written."""
