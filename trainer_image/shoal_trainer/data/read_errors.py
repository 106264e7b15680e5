"""Classifies read errors: outages, which are retried, and errors of the data or the user's code, which end the job.

An error of the network is an outage in any form of data: by its class, that of an error which caused it, or its
`errno`. Libraries have classes of their own, and a Python error inside a data set arrives as a TensorFlow error with
the *name* of its class in the message, so classes are known by their names everywhere. Of a file of the data, whatever
else the file system answers is an outage as well; errors of a parser or of the user's code are not.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""The file system answers that the file does not exist."""
OF_NETWORK = {
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}  # fmt: skip
"""A network or a mount does not answer; a number below 0 is one of name resolution (`socket.gaierror`)."""
NETWORK = {
    # Python
    "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
    "TimeoutError", "gaierror", "SSLEOFError", "IncompleteRead", "RemoteDisconnected",
    # requests, urllib3
    "Timeout", "ConnectTimeout", "ReadTimeout", "ChunkedEncodingError", "MaxRetryError", "NewConnectionError",
    "NameResolutionError", "ReadTimeoutError", "ConnectTimeoutError", "ProtocolError",
    # httpx, google.auth, Google's and Azure's clients
    "TransportError", "ConnectError", "ReadError", "RemoteProtocolError", "ServiceUnavailable", "GatewayTimeout",
    "TooManyRequests", "ServiceRequestError", "ServiceResponseError",
    # botocore, aiohttp
    "HTTPClientError", "EndpointConnectionError", "ConnectionClosedError", "ClientConnectionError",
    "ClientConnectorError", "ClientPayloadError", "ServerDisconnectedError", "ServerTimeoutError",
}  # fmt: skip
"""Names of classes of network errors: a subclass is one, too."""
STATUS = re.compile(r"\D{0,20}\b(408|429|5\d\d)\b")
"""The start of the message of an `HTTPError` of a server that is busy or broken; its other answers are final."""
TRACEBACK = "Traceback (most recent call last)"
GRAPH = re.compile(r"Graph execution error|in user code:")
"""Start of a message that gives a traceback of the graph or the user's code before the cause."""
WAY = re.compile(r'\s*(File "|Detected at node|<stack traces unavailable>)')
ROOTS = re.compile(r"^\d+ root error\(s\) found\. \(0\) (\w+: )?")
NODE = re.compile(r"^{{.*?}} | \[Op:\w+\] name: $")
"""The position in the graph, which TensorFlow puts around a message."""
PYTHON = re.compile(r"^(\w+): (?:<urlopen error )?(?:\[[Ee]rrno (-?\d+)\])?")
QUALIFIED = re.compile(r"^(\w+\.)*(?=\w+: )")
IN_MAP = re.compile(r"^Error in user-defined function passed to \w+:\d+ transformation with iterator: \S+: ")
"""The prefix of an error in a mapped function."""


def is_outage(error: BaseException, path: str | None = None) -> bool:
    """Whether an error of reading a file of the data is an outage, so that it may become readable again.

    `path`: the file. If another file does not exist (an image that a parse function opens), it is not an outage.
    """
    import tensorflow as tf

    if is_network_outage(error):
        return True
    raised = _raised(error)
    if raised is not None:
        return raised.of_system and raised.number is not None and raised.number not in NOT_THERE
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
    """Whether an error, or one that caused it, is of the network. That of the user's code is no outage otherwise."""
    import tensorflow as tf

    transient = tf.errors.UnavailableError | tf.errors.DeadlineExceededError
    for each in chain_of(error):
        raised = [_from_text(line) for line in _lines(each)] or [_raised(each)]
        if any(isinstance(each, transient) if one is None else one.of_network for one in raised):
            return True
    return False


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


class _Raised(NamedTuple):
    """A Python error, raised here or in a data set: the names of its class and of those above, if they are known."""

    names: frozenset[str]
    number: int | None
    text: str

    @property
    def of_system(self) -> bool:
        return "OSError" in self.names

    @property
    def of_network(self) -> bool:
        answered = "HTTPError" in self.names and STATUS.match(self.text) is not None
        known = self.number is not None and (self.number < 0 or self.number in OF_NETWORK)
        return answered or (known and self.of_system) or not NETWORK.isdisjoint(self.names)


def _raised(error: BaseException) -> _Raised | None:
    """See `_Raised`; None for an error of TensorFlow itself."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None
        return _Raised(_names(type(error)), number, str(error))
    return next(map(_from_text, _lines(error)), None)


def _lines(error: BaseException) -> list[str]:
    """The Python errors in the text of one of TensorFlow, the last one first; then those that led to it."""
    import tensorflow as tf

    text = str(error)
    if not isinstance(error, tf.errors.OpError) or TRACEBACK not in text:
        return []
    first, *others = text.splitlines()
    first = NODE.sub("", IN_MAP.sub("", NODE.sub("", first)))
    return [first, *(QUALIFIED.sub("", line) for line in others if QUALIFIED.match(line))]


def _from_text(line: str) -> _Raised | None:
    if (found := PYTHON.match(line)) is None:
        return None
    number = None if found[2] is None else int(found[2])
    kind = getattr(builtins, found[1], None)
    if isinstance(kind, type):
        names = _names(kind)
    else:  # that has a number, like any OSError
        names = frozenset({found[1]} if number is None else {found[1], "OSError"})
    return _Raised(names, number, line.partition(": ")[2])


def _names(kind: type) -> frozenset[str]:
    return frozenset(each.__name__ for each in kind.__mro__)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what led to it: `raise … from`, an error during whose handling it was raised, urllib's reason."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, getattr(each, "reason", None)]
            waiting += [] if each.__suppress_context__ else [each.__context__]
