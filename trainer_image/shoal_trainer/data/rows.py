"""Elements of a data set as rows: to cut, join and reorder them, whatever their structure. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.data.batch import leaves, located, map_leaves, named_in, paths_of, rows_of
from shoal_trainer.errors import UserError


def count(element: Any) -> int:
    """The number of rows of an element, whose arrays have the rows on axis 0."""
    return rows_of(next(leaves(element)))


def taken(element: Any, rows: Any) -> Any:
    """The rows of an element, by a slice (a view) or an array of positions (a copy)."""
    return map_leaves(lambda leaf: np.asarray(leaf)[rows], element)


def alike(one: Any, other: Any) -> bool:
    """Whether the rows of two elements have the same arrays of the same shapes, so that they can be joined."""
    shapes = ([(path, np.shape(leaf)[1:]) for path, leaf in located(each)] for each in (one, other))
    return next(shapes) == next(shapes)


def columns(elements: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The arrays of several elements, those of one name together. Raises `UserError` if one has others than the first.

    By their number alone, one column would be trained under another one's name.
    """
    first = paths_of(elements[0])
    for element in elements:
        if paths_of(element) != first:
            raise UserError(
                f"A sample has {named_in(element)}, and another one {named_in(elements[0])}. Make all samples alike in "
                "structure: give each of them the same keys, and a value where it has none."
            )
    return zip(*map(leaves, elements), strict=True)


def joined(elements: Sequence[Any]) -> Any:
    """All rows of several elements as one."""
    if len(elements) == 1:
        return elements[0]
    found = columns(elements)
    return map_leaves(lambda _: np.concatenate([np.asarray(leaf) for leaf in next(found)]), elements[0])


def stacked(rows: Sequence[npt.NDArray[Any]], advice: str) -> npt.NDArray[Any]:
    """The array with these rows. Raises `UserError`, which ends with `advice`, if their shapes differ."""
    if len(shapes := {row.shape for row in rows}) > 1:
        raise UserError(
            f"The samples have different shapes: {', '.join(map(str, sorted(shapes)[:4]))}. {advice}"
        )
    return np.stack(rows)


def rebatched(elements: Iterable[Any], size: int) -> Iterator[Any]:
    """The rows of the elements, in elements of `size` rows: less at the end, and where the shapes of rows change."""
    waiting: list[Any] = []
    missing = size
    for element in elements:
        if waiting and not alike(waiting[0], element):
            yield joined(waiting)
            waiting, missing = [], size
        rows, low = count(element), 0
        while rows - low >= missing:
            part = element if (low, missing) == (0, rows) else taken(element, slice(low, low + missing))
            yield joined([*waiting, part])
            low += missing
            waiting, missing = [], size
        if low < rows:
            waiting.append(taken(element, slice(low, rows)))
            missing -= rows - low
    if waiting:
        yield joined(waiting)
