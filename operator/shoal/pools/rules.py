"""When a pool is sized, and to how many nodes: pure.

Nobody is fought: a size that is neither the one that was last set nor the one that is being set is somebody else's, and
nothing is done until it is back. While a change is under way no size says whose it is: GKE reports each zone's by
itself, and nodes beside for an upgrade. What is about to be set is remembered before it is set, so that a process that
dies between the two recognizes its own doing. A pool grows at once and shrinks late, to the highest size that was
recommended meanwhile, because a node that comes back costs its start-up time; and not while what is sized may take a
node that a job uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from shoal.api.base import Reason
from shoal.api.capacity_pool_status import Sized

BETWEEN_RESIZES = timedelta(minutes=2)
GIVE_UP_AFTER = timedelta(minutes=10)
"""A size that cannot be given back for this long stays as it is."""


@dataclass(frozen=True)
class Target:
    """What is read of that which is sized."""

    nodes: int
    """The size that it was told to have."""
    minimum: int = 0
    maximum: int | None = None
    step: int = 1
    """It has a multiple of these nodes, as with the same number in each of several zones."""
    busy: str = ""
    """A change of it is under way: which."""
    sized_by: Reason | None = None
    """Who else sizes it, and what to do."""
    version: str = ""
    """Its version, for a write that must not follow another change."""
    empty_first: bool = False
    """A smaller size takes nodes without pods first."""
    outdated: bool = False
    """Whatever its size, it is to be set again: what its nodes are has changed."""
    absent: bool = False
    """It is Shoal's own, and is not there, or not any more: nobody sizes it."""


@dataclass(frozen=True)
class Wish:
    """The size that a pool should have."""

    nodes: int
    limit: int
    """Never more than these."""
    problem: Reason | None = None
    """Why it is not to be followed now."""
    no_more: Reason | None = None
    """Why it is followed only to a smaller size."""
    in_use: int = 0
    """Nodes that a smaller size is not to take."""
    least: int | None = 0
    """Never fewer than these, if the target allows them. None: no job has used it yet, so those that were found may be
    others', and stay, beside what is wished."""


@dataclass(frozen=True)
class Pace:
    """How fast sizes may follow each other."""

    between: timedelta = BETWEEN_RESIZES
    shrink_after: timedelta = timedelta(minutes=10)


@dataclass(frozen=True)
class Decision:
    """What to do now. `memory` is stored before `resize` is done."""

    memory: Sized | None
    resize: int | None = None
    conflict: Reason | None = None
    """Somebody else sizes it: nothing is done."""
    unsure: bool = False
    """Whether somebody else sizes it cannot be seen now."""
    scaled: bool = False
    """It has the size that it should have."""
    why: Reason = Reason("", "")
    wait: timedelta | None = None
    """Decide again after this time, though nothing changes."""
    ended: bool = False
    """For a release: there is nothing left to do."""


def decide(wish: Wish, memory: Sized | None, target: Target, now: datetime, pace: Pace) -> Decision:
    """What to do so that the target has the size that is wished."""
    if memory is not None:
        memory = _settled(memory, target)
    if target.busy and target.sized_by is None:
        return Decision(memory, unsure=True, why=Reason("Busy", target.busy))
    if (conflict := conflict_of(memory, target)) is not None:
        return Decision(memory and _without_window(memory), conflict=conflict, why=_stopped(conflict))
    if wish.problem is not None:
        return Decision(memory and _without_window(memory), why=wish.problem)
    memory = memory or Sized(original_nodes=target.nodes, nodes=target.nodes)
    bounds = _bounds(wish, target)
    if bounds is None:
        words = (
            f"at most {wish.limit} nodes are allowed by spec.limits.nodes, and at least {target.minimum} by what is "
            "sized, which allows {most}, in steps of {step}: make room between them"
        )
        most = "any number" if target.maximum is None else f"at most {target.maximum}"
        why = Reason("NoSizeAllowed", words.format(most=most, step=target.step))
        return Decision(_without_window(memory), why=why)
    found = min(memory.original_nodes, target.nodes) if wish.least is None else 0
    wanted = max(wish.nodes + found, wish.least or 0)
    # What was found stays as it is, though it be no multiple of a step, or more than the limit.
    wanted = found if found and wanted == found else max(found, _within(wanted, bounds, target.step))
    if wanted == target.nodes and not target.outdated:
        why = _unused(wish, wanted) if found else _reached(wish, wanted)
        return Decision(_without_window(memory), scaled=True, why=why)
    if wanted > target.nodes and wish.no_more is not None:
        return Decision(_without_window(memory), why=wish.no_more)
    if wanted >= target.nodes:
        return _resize(_without_window(memory), wanted, target, now, pace)
    if wish.in_use and not target.empty_first:
        words = (
            f"a smaller size may take any node, and {wish.in_use} are not to be taken (spec.scaling.shrink): it stays "
            f"at {target.nodes} until none is; give parameter servers a pool of their own, or take idle nodes away"
        )
        return Decision(_without_window(memory), why=Reason("NodesInUse", words))
    since = memory.lower_since
    if since is None or since > now:  # a clock that was set back
        memory = memory.model_copy(update={"lower_since": now, "highest": wanted})
    else:
        memory = memory.model_copy(update={"highest": max(memory.highest, wanted)})
    left = (memory.lower_since or now) + pace.shrink_after - now
    if left > timedelta(0):
        words = f"it shrinks from {target.nodes} nodes to {memory.highest} at {_clock(now + left)}"
        return Decision(memory, why=Reason("ShrinksLater", words), wait=left)
    lower = _within(memory.highest, bounds, target.step)
    return _resize(memory, min(lower, target.nodes), target, now, pace)


def release(memory: Sized, target: Target, now: datetime, pace: Pace) -> Decision:
    """What to do so that the target has the size again that it was found with, or the next one that can be set."""
    memory = _without_window(_settled(memory, target))
    if target.absent:
        return Decision(memory, scaled=True, why=Reason("Released", "it is gone"), ended=True)
    if target.busy and target.sized_by is None:
        return Decision(memory, unsure=True, why=Reason("Busy", target.busy))
    if (conflict := conflict_of(memory, target)) is not None:
        why = Reason("LeftAsItIs", f"it keeps {target.nodes} nodes: {conflict.message}")
        return Decision(memory, conflict=conflict, why=why)
    original = memory.original_nodes
    most = original if target.maximum is None else min(original, target.maximum)
    found = max(most, target.minimum)
    wanted = _stepped(found, target.step)
    if target.nodes in {found, wanted}:
        words = "as before" if target.nodes == original else f"it was found with {original}"
        why = Reason("Released", f"{target.nodes} nodes, {words}")
        return Decision(memory, scaled=True, why=why, ended=True)
    return _resize(memory, wanted, target, now, pace)


def conflict_of(memory: Sized | None, target: Target) -> Reason | None:
    """Who else sizes the target, and what to do."""
    if target.sized_by is not None:
        return target.sized_by
    if memory is None or target.nodes in {memory.nodes, memory.setting}:
        return None
    words = (
        f"somebody set {target.nodes} nodes where Shoal had set {memory.nodes}: end what sets it and set "
        f"{memory.nodes} again, or let Shoal begin anew with spec.scaling.mode Pods and back"
    )
    return Reason("SizeChanged", words)


def _settled(memory: Sized, target: Target) -> Sized:
    """The size that was being set is the one that it has; what is not there has the size of nobody."""
    if target.absent:
        return memory.model_copy(update={"nodes": target.nodes, "setting": None})
    if memory.setting is None or target.nodes != memory.setting:
        return memory
    return memory.model_copy(update={"nodes": memory.setting, "setting": None})


def _without_window(memory: Sized) -> Sized:
    return memory.model_copy(update={"lower_since": None, "highest": 0})


def _bounds(wish: Wish, target: Target) -> tuple[int, int] | None:
    """The least and the most nodes; None if there is no such number."""
    most = wish.limit if target.maximum is None else min(wish.limit, target.maximum)
    high = most // target.step * target.step
    low = _stepped(target.minimum, target.step)
    return (low, high) if low <= high else None


def _within(nodes: int, bounds: tuple[int, int], step: int) -> int:
    return min(bounds[1], max(bounds[0], _stepped(nodes, step)))


def _stepped(nodes: int, step: int) -> int:
    """The next multiple of the step."""
    return -(-nodes // step) * step


def _resize(memory: Sized, wanted: int, target: Target, now: datetime, pace: Pace) -> Decision:
    last = memory.resized_at
    if last is not None and last <= now and (left := last + pace.between - now) > timedelta(0):
        words = f"from {target.nodes} nodes to {wanted} at {_clock(now + left)}: it was resized just now"
        return Decision(memory, why=Reason("Waits", words), wait=left)
    shrunk_at = now if wanted < target.nodes else memory.shrunk_at
    set_now = {"nodes": target.nodes, "setting": wanted, "resized_at": now, "shrunk_at": shrunk_at}
    kept = _without_window(memory).model_copy(update=set_now)
    words = f"from {target.nodes} nodes to {wanted}"
    if wanted == target.nodes:
        words = f"{wanted} nodes, as the pool describes them now"
    return Decision(kept, resize=wanted, why=Reason("Resizing", words))


def _clock(at: datetime) -> str:
    """A time that does not change while it is waited for, unlike the seconds that are left."""
    return f"{at:%H:%M:%S}"


def _reached(wish: Wish, nodes: int) -> Reason:
    if nodes == wish.nodes:
        return Reason("AsRecommended", f"{nodes} nodes")
    return Reason("WithinLimits", f"{nodes} nodes; {wish.nodes} are recommended")


def _unused(wish: Wish, nodes: int) -> Reason:
    words = (
        f"{nodes} nodes; {wish.nodes} are recommended beside those that were found, since no job has used it yet, and "
        "what runs there may be others': set spec.scaling.minNodes to how few it may have"
    )
    return Reason("NotUsedYet", words)


def _stopped(conflict: Reason) -> Reason:
    return Reason("FieldConflict", f"nothing is done: {conflict.reason}")
