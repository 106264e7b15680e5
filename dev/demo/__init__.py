"""`make demo`: the main job on a real cluster, while its nodes and its parameter server are taken away."""

from dev.demo.run import run

__all__ = ["run"]
