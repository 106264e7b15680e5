"""`make demo`: a job on a real cluster while its nodes and its parameter server are lost."""

from dev.demo.run import run

__all__ = ["run"]
