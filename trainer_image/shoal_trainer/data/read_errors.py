"""Classifies read errors: outages, which are retried, and errors of the data or the user's code, which end the job.

Errors of a file system or a network (an `errno`, or TensorFlow's code for one) are outages; errors of a parser or of
the user's code are not. A Python error inside a data set arrives as a TensorFlow error with its class in the message.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import re

NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""The file system answers that the file does not exist."""
NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
"""A disk is full."""
TRACEBACK = "Traceback (most recent call last)"
GRAPH = re.compile(r"Graph execution error|in user code:")
"""Start of a message that gives a traceback of the graph or the user's code before the cause."""
WAY = re.compile(r'\s*(File "|Detected at node|<stack traces unavailable>)')
ROOTS = re.compile(r"^\d+ root error\(s\) found\. \(0\) (\w+: )?")
NODE = re.compile(r"^{{.*?}} | \[Op:\w+\] name: $")
"""The position in the graph, which TensorFlow puts around a message."""
PYTHON = re.compile(r"^(\w+): (?:\[[Ee]rrno (\d+)\])?")
IN_MAP = re.compile(r"^Error in user-defined function passed to \w+:\d+ transformation with iterator: \S+: ")
"""The prefix of an error in a mapped function."""


def has_no_room(error: BaseException) -> bool:
    """Whether a disk is full, as Python says it, or HDF5 and TensorFlow in words."""
    words = ("No space left on device", "Disk quota exceeded")
    number = error.errno if isinstance(error, OSError) else None
    return number in NO_ROOM or any(text in str(error) for text in words)


def is_outage(error: BaseException, path: str | None = None) -> bool:
    """Whether the error is an outage, so that the file may become readable again.

    `path`: the file. If another file does not exist (an image that a parse function opens), it is not an outage.
    """
    import tensorflow as tf

    raised = _raised(error)
    if raised is not None:
        kind, number = raised
        outage = issubclass(kind, OSError) and number is not None and number not in NOT_THERE
        return outage or issubclass(kind, ConnectionError | TimeoutError)
    errors = tf.errors
    permanent = (
        errors.DataLossError,
        errors.InvalidArgumentError,
        errors.OutOfRangeError,
        errors.FailedPreconditionError,
        errors.UnimplementedError,
        errors.InternalError,
        errors.ResourceExhaustedError,
    )
    if path is not None and isinstance(error, errors.NotFoundError):
        return re.search(re.escape(path) + r"(?![\w./-])", str(error)) is not None
    return isinstance(error, errors.OpError) and not isinstance(error, permanent)


def is_network_outage(error: BaseException) -> bool:
    """Whether an error of the user's function is a network outage; its other errors are not outages."""
    import tensorflow as tf

    raised = _raised(error)
    if raised is not None:
        return issubclass(raised[0], ConnectionError | TimeoutError)
    return isinstance(error, tf.errors.UnavailableError | tf.errors.DeadlineExceededError)


def summary(error: BaseException) -> str:
    """The message in one line, without TensorFlow's additions."""
    import tensorflow as tf

    if GRAPH.match(str(error)):
        return cause(str(error))[:300]
    lines = str(error).splitlines() or [""]
    text = NODE.sub("", lines[0])
    if isinstance(error, tf.errors.OpError) and TRACEBACK in str(error):
        text = re.sub(r"^\w+Error: ", "", text)
    return text[:300] or type(error).__name__


def cause(text: str) -> str:
    """The cause at the end of a message with a traceback, in one line."""
    lines = text.split("[[{{node", 1)[0].splitlines()
    way = [number for number, line in enumerate(lines) if WAY.match(line)]
    if way:
        deep = _indent(lines[way[-1]])  # a traceback line may be followed by its source code
        lines = list(
            itertools.dropwhile(lambda line: not line.strip() or _indent(line) > deep, lines[way[-1] + 1 :])
        )
    return ROOTS.sub("", " ".join(" ".join(lines).split())) or text.splitlines()[0]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _raised(error: BaseException) -> tuple[type[BaseException], int | None] | None:
    """The class and errno of a Python error, raised here or in a data set; None for an error of TensorFlow itself."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return type(error), error.errno if isinstance(error, OSError) else None
    text = str(error)
    if TRACEBACK not in text:
        return None
    first = IN_MAP.sub("", NODE.sub("", text.splitlines()[0]))
    found = PYTHON.match(NODE.sub("", first))
    if found is None:
        return None
    kind = getattr(builtins, found[1], Exception)
    number = None if found[2] is None else int(found[2])
    return (kind if isinstance(kind, type) and issubclass(kind, BaseException) else Exception), number
