"""What an error in reading says: that the data are away for a while, or that somebody has to change something.

A job that ends for a short outage is lost for nothing; one that tries a damaged file for ever is lost, too. What a file
system or a network says in its own words (an `errno`, TensorFlow's code for one) is the former, what a parser or the
user's code says is the latter. Python's errors in a data set arrive as TensorFlow's, with their names in the text.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import re

NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Of a file system: it answers, and there is no such file."""
TRACEBACK = "Traceback (most recent call last)"
GRAPH = re.compile(r"Graph execution error|in user code:")
"""How a message begins that tells the way through the graph, or through the user's code, before the cause."""
WAY = re.compile(r'\s*(File "|Detected at node|<stack traces unavailable>)')
ROOTS = re.compile(r"^\d+ root error\(s\) found\. \(0\) (\w+: )?")
NODE = re.compile(r"^{{.*?}} | \[Op:\w+\] name: $")
"""What TensorFlow puts around a message: where in its graph that was."""
PYTHON = re.compile(r"^(\w+): (?:\[[Ee]rrno (\d+)\])?")
IN_MAP = re.compile(r"^Error in user-defined function passed to \w+:\d+ transformation with iterator: \S+: ")
"""What TensorFlow puts before an error of a function that a data set maps."""


def away(error: BaseException, path: str | None = None) -> bool:
    """Whether a file may become readable again as it is.

    `path`: of that file. Where another one does not exist (an image that a parse function opens), waiting is no help.
    """
    import tensorflow as tf

    raised = _raised(error)
    if raised is not None:
        kind, number = raised
        spoke = issubclass(kind, OSError) and number is not None and number not in NOT_THERE
        return spoke or issubclass(kind, ConnectionError | TimeoutError)
    errors = tf.errors
    mine = (
        errors.DataLossError,
        errors.InvalidArgumentError,
        errors.OutOfRangeError,
        errors.FailedPreconditionError,
        errors.UnimplementedError,
        errors.InternalError,
        errors.ResourceExhaustedError,
    )
    if path is not None and isinstance(error, errors.NotFoundError) and path not in str(error):
        return False
    return isinstance(error, errors.OpError) and not isinstance(error, mine)


def unconnected(error: BaseException) -> bool:
    """Of a function that may do anything: whether a network is down. Of other errors nobody knows what they mean."""
    import tensorflow as tf

    raised = _raised(error)
    if raised is not None:
        return issubclass(raised[0], ConnectionError | TimeoutError)
    return isinstance(error, tf.errors.UnavailableError | tf.errors.DeadlineExceededError)


def words(error: BaseException) -> str:
    """The error in one line, without what TensorFlow puts around it."""
    import tensorflow as tf

    if GRAPH.match(str(error)):
        return cause(str(error))[:300]
    lines = str(error).splitlines() or [""]
    text = NODE.sub("", lines[0])
    if isinstance(error, tf.errors.OpError) and TRACEBACK in str(error):
        text = re.sub(r"^\w+Error: ", "", text)
    return text[:300] or type(error).__name__


def cause(text: str) -> str:
    """Of a message that tells the way first what it says then, in one line: the cause is at its end."""
    lines = text.split("[[{{node", 1)[0].splitlines()
    way = [number for number, line in enumerate(lines) if WAY.match(line)]
    if way:
        deep = _indent(lines[way[-1]])  # below a line of the way there may be its code
        lines = list(
            itertools.dropwhile(lambda line: not line.strip() or _indent(line) > deep, lines[way[-1] + 1 :])
        )
    return ROOTS.sub("", " ".join(" ".join(lines).split())) or text.splitlines()[0]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _raised(error: BaseException) -> tuple[type[BaseException], int | None] | None:
    """The kind and errno of what Python raised, here or in a data set; None for what TensorFlow says itself."""
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
