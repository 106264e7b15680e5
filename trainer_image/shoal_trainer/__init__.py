"""Elastic distributed training of Keras models with asynchronous parameter servers."""

from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Arrays, Indexed
from shoal_trainer.errors import TrainerError, UserError
from shoal_trainer.training import Training

__all__ = ["Arrays", "Files", "Indexed", "TrainerError", "Training", "UserError"]
