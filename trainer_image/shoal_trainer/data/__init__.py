"""The user's training data, as something of which any range or file can be read again by any worker."""

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Indexed

__all__ = ["Batch", "Files", "Indexed"]
