"""Every error that Shoal raises on purpose.

```
ShoalError
├── UsageError         the caller can mend it: a file, a flag, a column, a value. The command line exits 2
│   └── NotEnoughData  a fit was asked of fewer measurements than it needs
└── ClusterError       the cluster refused or cannot be reached
    ├── Refused        the API server will not take this object as it is (400, 422): terminal until it changes
    ├── Unavailable    no answer, or one that may differ next time
    └── LeaseLost      another operator leads, or may: nothing must be written any more
```
"""


class ShoalError(Exception):
    """The root of the tree."""


class UsageError(ShoalError, ValueError):
    """Bad input. The message is one sentence that says what to change."""


class NotEnoughData(UsageError):
    """A fit was asked of fewer measurements than it needs."""


class ClusterError(ShoalError):
    """The cluster refused, or cannot be reached."""


class Refused(ClusterError):
    """The API server will not take this object as it is (400, 422)."""


class Unavailable(ClusterError):
    """No answer from the API server, or one that may differ next time."""


class LeaseLost(ClusterError):
    """Another operator leads, or may: nothing must be written any more."""
