"""Every error that the trainer raises on purpose.

```
TrainerError
├── UserError       the user's code or configuration: says what to change; the process exits 2, never retried silently
├── ProtocolError   a peer sent what the protocol does not allow; the connection is closed
│   └── Unauthorized  a peer could not prove that it belongs to this job
├── Fenced          a newer incarnation holds this place: stop, touch nothing
├── Overtaken       a piece of work is somebody else's by now: leave it
├── Unreachable     a peer or the storage does not answer now; callers retry
└── SnapshotError   a snapshot is absent, incomplete or corrupt
```
"""


class TrainerError(Exception):
    """The root of the tree."""


class UserError(TrainerError):
    """The user's code or configuration. The message says what to change."""


class ProtocolError(TrainerError):
    """A peer sent what the protocol does not allow."""


class Unauthorized(ProtocolError):
    """A peer could not prove that it belongs to this job."""


class Fenced(TrainerError):
    """A newer incarnation holds this place."""


class Overtaken(TrainerError):
    """A piece of work is somebody else's by now."""


class Unreachable(TrainerError):
    """A peer or the storage does not answer now."""


class SnapshotError(TrainerError):
    """A snapshot is absent, incomplete or corrupt."""
