"""What a user of the trainer writes: one `Training`, in plain Keras 3.

Nothing here imports TensorFlow or Keras before it is used: a parameter server imports this package and has neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Arrays, Indexed
from shoal_trainer.errors import UserError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class Training:
    """One model, its data, and how to judge it.

    `model()` returns a compiled Keras model: loss, optimizer and metrics are read from its `compile()`.
    `data` is `Indexed(size, fn)`, `Indexed.from_arrays(x, y)` or `Files(pattern, fn)`.
    `validation` is the same, or a function that returns a `tf.data.Dataset` of single samples; it is evaluated after
    each epoch and at the end.
    `callbacks()` returns the Keras callbacks; they run where the evaluation runs, on one worker, once in an epoch.
    `wire`: how parameters and gradients travel: bfloat16 halves the bytes, fp32 is exact.
    `on_nan`: what a loss that is not finite does: end the job with an error, skip that batch, or have the whole job
    go back to its newest snapshot and go on without that batch.
    `seed`: for the initial parameters, and with the worker's slot for Dropout.

    >>> job = Training(model=build, data=Indexed.from_arrays(x, y), validation=Indexed.from_arrays(a, b))
    """

    model: Callable[[], keras.Model]
    data: Indexed | Arrays | Files
    validation: Indexed | Arrays | Files | Callable[[], tf.data.Dataset] | None = None
    callbacks: Callable[[], Sequence[keras.callbacks.Callback]] | None = None
    wire: Literal["bf16", "fp32"] = "bf16"
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise UserError(
                "Training(model=…) must be a function that returns a compiled Keras model, not the model."
            )
        if not isinstance(self.data, Indexed | Arrays | Files):
            raise UserError(
                f"Training(data=…) must be Indexed(size, fn), Indexed.from_arrays(x, y) or Files(pattern, fn), "
                f"not {type(self.data).__name__}."
            )
        if self.validation is not None and not (
            isinstance(self.validation, Indexed | Arrays | Files) or callable(self.validation)
        ):
            raise UserError(
                "Training(validation=…) must be Indexed, Files or a function that returns a tf.data.Dataset, "
                f"not {type(self.validation).__name__}."
            )
        if self.callbacks is not None and not callable(self.callbacks):
            raise UserError(
                "Training(callbacks=…) must be a function that returns a list of Keras callbacks."
            )
        if self.wire not in {"bf16", "fp32"}:
            raise UserError(f'Training(wire=…) must be "bf16" or "fp32", not {self.wire!r}.')
        if self.on_nan not in {"stop", "skip", "rollback"}:
            raise UserError(f'Training(on_nan=…) must be "stop", "skip" or "rollback", not {self.on_nan!r}.')

    def fit(self, *, epochs: int = 1, batch_size: int = 128, verbose: int | str = "auto") -> keras.Model:
        """Train alone in this process with Keras' own `fit`: the same script on a laptop, no parameter server."""
        from shoal_trainer.worker.alone import fit

        return fit(self, epochs=epochs, batch_size=batch_size, verbose=verbose)


def as_training(found: Any, args: dict[str, Any], where: str) -> Training:
    """The `Training` behind an entrypoint: itself, or a function of the job's args that returns one."""
    if isinstance(found, Training):
        if args:
            raise UserError(
                f"{where} is a Training and takes no args, but spec.training.args gives {', '.join(sorted(args))}. "
                "Make it a function that takes them and returns a Training."
            )
        return found
    if not callable(found):
        raise UserError(
            f"{where} is a {type(found).__name__}. It must be a shoal_trainer.Training or return one."
        )
    try:
        inspect.signature(found).bind(**args)
    except TypeError as error:
        raise UserError(f"{where} cannot be called with spec.training.args: {error}.") from error
    except ValueError:
        pass  # it is not written in Python: the call itself will tell
    made = found(**args)
    if not isinstance(made, Training):
        raise UserError(f"{where}() returned {type(made).__name__}. It must return a shoal_trainer.Training.")
    return made
