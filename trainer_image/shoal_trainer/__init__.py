"""The trainer of Shoal: asynchronous parameter servers and the workers that come and go around them."""

from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Indexed
from shoal_trainer.errors import TrainerError, UserError
from shoal_trainer.training import Training

__all__ = ["Files", "Indexed", "TrainerError", "Training", "UserError"]
