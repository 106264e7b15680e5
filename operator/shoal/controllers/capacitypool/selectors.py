"""Selectors of pools by the labels that they ask for: which of a thousand select a node costs a look at its labels.

Each selector stands under one of its labels, the one that fewest have: what has all of its labels has that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

Label = tuple[str, str]


class Selectors:
    """Selectors by the names of their pools."""

    def __init__(self) -> None:
        self._selectors: dict[str, Mapping[str, str]] = {}
        self._stands: dict[str, Label] = {}
        self._under: defaultdict[Label, set[str]] = defaultdict(set)
        self._asking: defaultdict[Label, set[str]] = defaultdict(set)
        """All that ask for a label."""

    def put(self, name: str, selector: Mapping[str, str]) -> None:
        """Take a new one."""
        self._selectors[name] = selector
        if not selector:
            return
        self._stands[name] = rarest = self._rarest(selector)
        self._under[rarest].add(name)
        for label in selector.items():
            self._asking[label].add(name)

    def drop(self, name: str) -> None:
        """Forget one."""
        selector = self._selectors.pop(name)
        if not selector:
            return
        _discard(self._under, self._stands.pop(name), name)
        for label in selector.items():
            _discard(self._asking, label, name)

    def selecting(self, labels: Mapping[str, str]) -> set[str]:
        """Whose selector has only labels of these."""
        near = (self._under.get(label, ()) for label in labels.items())
        return {name for names in near for name in names if selects(self._selectors[name], labels)}

    def related(self, name: str) -> set[str]:
        """Other pools that select all nodes that this one does, or of whose nodes it selects all."""
        selector = self._selectors.get(name)
        if not selector:
            return set()
        narrower = self._asking[self._rarest(selector)]
        found = {other for other in narrower if selects(selector, self._selectors[other])}
        return (found | self.selecting(selector)) - {name}

    def _rarest(self, selector: Mapping[str, str]) -> Label:
        return min(selector.items(), key=lambda label: len(self._asking.get(label, ())))


def _discard(index: defaultdict[Label, set[str]], label: Label, name: str) -> None:
    index[label].discard(name)
    if not index[label]:
        del index[label]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one of a pool: it has all of the selector. Without one there is none."""
    return bool(selector) and selector.items() <= labels.items()
