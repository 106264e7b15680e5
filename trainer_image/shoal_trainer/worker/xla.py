"""XLA: what its errors mean, and Keras' choice to use it, which depends on whether there is a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from shoal_trainer.worker.keras_internals import Trainer, model_supports_jit

INSTEAD = "Replace the operation, or pass jit_compile=False to compile()."
_UNSUPPORTED = re.compile(
    r"Detected unsupported operations[^:]*:\s*(.+?)(?:\n|$)"
    r"|(.*is not compilable.*)|(No registered .* OpKernel for XLA[^\n]*)"
)


def unsupported(error: BaseException) -> str:
    """What XLA cannot compile, in its words, from the first of the errors behind this one; empty if nothing is."""
    cause: BaseException | None = error
    words = ""
    while cause is not None:
        if found := _UNSUPPORTED.search(str(cause)):
            words = " ".join(next(filter(None, found.groups())).split())[:300]
        cause = cause.__cause__
    return words


@contextlib.contextmanager
def left_to_keras() -> Iterator[list[Trainer]]:
    """The models compiled in between with `jit_compile="auto"`, for which Keras chooses."""
    found, before = list[Trainer](), Trainer._resolve_auto_jit_compile

    def noted(model: Trainer) -> bool:
        found.append(model)
        return bool(before(model))

    Trainer._resolve_auto_jit_compile = noted
    try:
        yield found
    finally:
        Trainer._resolve_auto_jit_compile = before


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let `jit_compile="auto"`, Keras' default, decide as on a machine with a GPU; it turns XLA off without one."""
    before = Trainer._resolve_auto_jit_compile
    Trainer._resolve_auto_jit_compile = model_supports_jit
    try:
        yield
    finally:
        Trainer._resolve_auto_jit_compile = before
