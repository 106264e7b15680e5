"""The configuration of a worker or parameter server, from its environment."""

from __future__ import annotations

import os

from pydantic import ValidationError

from shoal_trainer.contract import CONFIG_ENV, RuntimeConfig
from shoal_trainer.errors import UserError


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
