"""`Training`: the model, data and callbacks of a job, in plain Keras 3.

TensorFlow and Keras are imported only where they are used: parameter servers import this package without them.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from shoal_trainer.contract import BATCH_SIZE
from shoal_trainer.data.adapt import ClassWeights, as_source
from shoal_trainer.data.mapped import Mapped
from shoal_trainer.errors import UserError

if TYPE_CHECKING:
    import keras

_JSON_LIST = (list, "a list of JSON, such as [64, 32]")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a number (int)"),
    "float": ((int, float), "a number (float)"),
    "bool": (bool, "true or false"),
    "list": _JSON_LIST,
    "tuple": _JSON_LIST,
    "dict": (dict, 'an object of JSON, such as {"a": 1}'),
}
"""Annotation -> what JSON has for it, and its name for people."""
MAX_BATCHES = 4096
"""The most batches of a push."""
_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A compiled model with its data, validation and callbacks: what a job trains.

    Args:
        model: A function without arguments that returns a compiled `keras.Model`. The loss, optimizer and metrics
            are those of its `compile()`.
        data: The training data: arrays `(x, y)` or `(x, y, sample_weight)`, `Indexed`, `Files`, a `tf.data.Dataset` of
            batches, a `keras.utils.PyDataset`, a data set with `len(…)` and `[index]` (Hugging Face, Grain, PyTorch),
            or `Stream(function, samples=N)`. A `tf.data.Dataset` is a `Stream`.
        validation: The validation data, in one of the same forms. They are evaluated after each epoch and at the end.
            Default: none.
        class_weight: The weights of classes, by their number, in the loss of training; of the others 1. For one output,
            as in Keras' `fit`. Default: all 1.
        callbacks: A function without arguments that returns a list of `keras.callbacks.Callback`. They run once per
            epoch, on the worker that evaluates. Default: none.
        wire: The encoding of parameters and gradients on the network: `"bf16"` (default) halves the bytes, `"fp32"`
            is exact.
        on_nan: What a non-finite loss or gradient does: `"stop"` (default) fails the job, `"skip"` leaves the batch
            out (after 20 in a row it fails the job), `"rollback"` returns the whole job to its newest snapshot and
            leaves the batch out.
        batches_per_push: The batches whose mean gradient is one push, and one update of as many times the weight.
            Default: 1, an update per batch as in Keras. More are for a model whose pushes take longer than its
            batches; they learn less from as many samples. No effect on an optimizer that runs on the worker.
        seed: The seed of the initial parameters, of the order of the data, and, with the worker's slot, of
            Dropout. Default: 0.

    Raises:
        UserError: An argument has the wrong type or value.

    >>> job = Training(model=build, data=Indexed.from_arrays(x, y), validation=Indexed.from_arrays(a, b))
    """

    model: Callable[[], keras.Model]
    data: Any
    validation: Any = None
    class_weight: Mapping[int, float] | None = None
    callbacks: Callable[[], Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None] | None = (
        None
    )
    wire: Literal["bf16", "fp32"] = "bf16"
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    batches_per_push: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        is_model = hasattr(self.model, "compile") and not isinstance(self.model, type)
        if not callable(self.model) or is_model:  # a Keras model is callable, too
            raise UserError(
                "Training(model=…) must be a function that returns a compiled Keras model, not the model."
            )
        self._convert()
        if self.callbacks is not None and not callable(self.callbacks):
            raise UserError(
                "Training(callbacks=…) must be a function that returns a list of Keras callbacks."
            )
        if self.wire not in {"bf16", "fp32"}:
            raise UserError(f'Training(wire=…) must be "bf16" or "fp32", not {self.wire!r}.')
        if self.on_nan not in {"stop", "skip", "rollback"}:
            raise UserError(f'Training(on_nan=…) must be "stop", "skip" or "rollback", not {self.on_nan!r}.')
        _check_number("seed", self.seed, 0, 2**32 - 1)
        _check_number("batches_per_push", self.batches_per_push, 1, MAX_BATCHES)

    def _convert(self) -> None:
        """Make sources of the data."""
        data = as_source(self.data, "Training(data=…)")
        data.check_countable()
        if self.class_weight is not None and not isinstance(data, Mapped):
            data = Mapped(data, ClassWeights.of(self.class_weight))
        object.__setattr__(self, "data", data)
        if self.validation is not None:
            object.__setattr__(self, "validation", as_source(self.validation, "Training(validation=…)"))

    def fit(
        self, *, epochs: int = 1, batch_size: int | None = None, verbose: int | str = "auto"
    ) -> keras.Model:
        """Train in this process with Keras' own `fit`, without parameter servers.

        `wire`, `on_nan` and `batches_per_push` have no effect here.

        Args:
            epochs: The number of passes over the data.
            batch_size: Samples per step; the last batch of a range or a file may be smaller. Default: as many as the
                batches of the data have, and 32 of data that are no batches, as in `keras.Model.fit`.
            verbose: `"auto"`, 0 (silent), 1 (progress bar) or 2 (one line per epoch), as in `keras.Model.fit`.

        Returns:
            The trained `keras.Model`.

        Raises:
            UserError: The data are empty, cannot be read or do not have the promised shape or size.
            TrainerError: The storage of the data does not answer.
        """
        from shoal_trainer.worker.alone import fit

        size = self.data.batch_size or BATCH_SIZE if batch_size is None else batch_size
        return fit(self, epochs=epochs, batch_size=size, verbose=verbose)


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    """Raise `UserError` unless the argument is a whole number in this range, also one of NumPy."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value <= most:
        raise UserError(f"Training({name}=…) must be a whole number from {least} to {most}, not {value!r}.")


def as_training(found: Any, args: dict[str, Any], where: str) -> Training:
    """The `Training` of an entrypoint, which is a `Training` or a function of the job's args that returns one."""
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
        signature = _signature(found)
        args = {name: _as_wanted(value, signature.parameters.get(name)) for name, value in args.items()}
        signature.bind(**args)
        _check_kinds(args, signature, where)
    except TypeError as error:
        takes = f"takes {', '.join(map(str, signature.parameters.values())) or 'no arguments'}"
        raise UserError(
            f"{where} cannot be called with spec.training.args: {error}. It {takes}. On a command line: --arg "
            "NAME=VALUE."
        ) from error
    except ValueError:
        pass  # a built-in without a signature: the call below raises
    made = found(**args)
    if not isinstance(made, Training):
        raise UserError(f"{where}() returned {type(made).__name__}. It must return a shoal_trainer.Training.")
    return made


def _signature(found: Callable[..., Any]) -> inspect.Signature:
    """The signature, with annotations that are text (`from __future__ import annotations`) as what they mean."""
    try:
        return inspect.signature(found, eval_str=True)
    except (NameError, SyntaxError, AttributeError):
        return inspect.signature(found)


def _check_kinds(args: dict[str, Any], signature: inspect.Signature, where: str) -> None:
    """Raise `UserError` where a parameter is annotated as something that its argument is not."""
    for name, value in args.items():
        kinds = _kinds(signature.parameters.get(name)) - {"NoneType"}
        wanted, words = _KINDS.get(next(iter(kinds)), (object, "")) if len(kinds) == 1 else (object, "")
        if not isinstance(value, wanted):
            raise UserError(f"{where}: the argument {name} must be {words}, not {value!r}.")


def _as_wanted(value: Any, parameter: inspect.Parameter | None) -> Any:
    """A decimal in quotes as a float, unless the parameter is a string: that gets text, also of a number or a boolean.

    It is a string by its annotation, also as one of several (`str | None`), or by its default. So is a float, which
    gets one of a whole number, too: Keras tells them apart, and in a manifest 1.0 arrives as 1. (A default of infinity
    may mean all of what is counted.)
    """
    kinds = _kinds(parameter)
    default = None if parameter is None else parameter.default
    if isinstance(default, str):
        kinds |= {"str"}
    elif isinstance(default, float) and math.isfinite(default):
        kinds |= {"float"}
    if type(value) is int and "float" in kinds and "int" not in kinds and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(value, bool | int | float):
        return json.dumps(value) if "str" in kinds and kinds.isdisjoint({"bool", "int", "float"}) else value
    decimal = isinstance(value, str) and _DECIMAL.match(value) and ("str" not in kinds or "float" in kinds)
    return float(value) if decimal else value


def _kinds(parameter: inspect.Parameter | None) -> set[str]:
    """The names of the types by which a parameter is annotated: "list" of `list[int]`, two of `str | None`."""
    return (
        set()
        if parameter is None or parameter.annotation is parameter.empty
        else set(_names(parameter.annotation))
    )


def _names(annotation: Any) -> Iterator[str]:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for each in members:
            yield from _names(each)
    elif origin is Annotated:
        yield from _names(members[0])
    elif origin is Literal:
        yield from (type(each).__name__ for each in members)
    elif isinstance(annotation, str):
        yield from (each.strip().partition("[")[0] for each in annotation.split("|"))
    else:
        yield str(getattr(origin or annotation, "__name__", ""))
