"""The user's training data: any worker can read any range or file, and read it again."""

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Indexed
from shoal_trainer.data.source import Source
from shoal_trainer.data.stream import Stream

__all__ = ["Batch", "Files", "Indexed", "Source", "Stream"]
