"""What a process learns from its environment: the configuration of a worker or parameter server, Keras' backend."""

from __future__ import annotations

import os

from pydantic import ValidationError

from shoal_trainer.contract import CONFIG_ENV, RuntimeConfig
from shoal_trainer.errors import UserError

BACKEND_ENV = "KERAS_BACKEND"


def use_tensorflow() -> None:
    """Make TensorFlow Keras' backend, whatever ~/.keras/keras.json says. To be called before Keras is imported.

    Raises `UserError` if the environment names another one.
    """
    named = os.environ.setdefault(BACKEND_ENV, "tensorflow")
    if named != "tensorflow":
        raise UserError(
            f"${BACKEND_ENV} is {named!r}, and Shoal trains with TensorFlow only: unset it, or set it to tensorflow."
        )


def configuration() -> RuntimeConfig:
    """What `$SHOAL_CONFIG` says. Raises `UserError` if it is missing or invalid."""
    try:
        return RuntimeConfig.model_validate_json(os.environ[CONFIG_ENV])
    except KeyError:
        raise UserError(
            f"${CONFIG_ENV} is not set. Use `shoal-trainer run` to train on this machine."
        ) from None
    except ValidationError as error:
        raise UserError(f"${CONFIG_ENV} is not a valid configuration: {error.errors()[0]['msg']}") from error
