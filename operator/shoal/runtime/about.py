"""What is being reconciled, for the log: a line in JSON has it in fields, whoever writes the line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ABOUT: ContextVar[dict[str, str]] = ContextVar("about")


@contextmanager
def about(controller: str, namespace: str, name: str) -> Iterator[None]:
    """What is logged from here on, also by the tasks that are begun here, is about this object."""
    token = _ABOUT.set({"controller": controller, "namespace": namespace, "name": name})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def fields() -> dict[str, str]:
    """`controller`, `namespace` and `name`, as other controllers name them; without an object none."""
    return _ABOUT.get({})
