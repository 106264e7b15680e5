"""`make demo`: a job on a real cluster.

By default its nodes and its parameter server are lost. STORY=pools: it is planned on pools of nodes.
"""

from __future__ import annotations

from dev.errors import DevError

STORIES = ("", "pools")


def story(name: str) -> int:
    """Run the story of this name. Returns the exit code."""
    if name not in STORIES:
        raise DevError(f"STORY is {name!r}; it may be pools, or not set.")
    from dev.demo.tell import tell

    if name == "pools":
        from dev.demo.pools.story import pools

        return tell("demo-pools", pools)
    from dev.demo.losses import losses

    return tell("demo", losses)
