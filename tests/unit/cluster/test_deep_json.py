"""JSON that is nested too deeply is cut, and nothing else of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.deep_json import DEEPEST, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans())
def test_what_is_not_deep_is_read_as_it_is(value: object, escaped: bool) -> None:
    assert loads(json.dumps(value, ensure_ascii=escaped).encode()) == value


@given(st.integers(0, 5000), st.integers(0, 5000), VALUES)
def test_deep_parts_are_cut_and_what_follows_is_read(first: int, second: int, value: object) -> None:
    deep = ["[" * each + '{"]": "}"}' + "]" * each for each in (first, second)]
    found = loads(f'{{"a": {deep[0]}, "b": {deep[1]}, "c": {json.dumps(value)}}}'.encode())
    assert found["c"] == value
    for name, depth in (("a", first), ("b", second)):
        inner, levels = found[name], 0
        while isinstance(inner, list):
            [inner], levels = inner, levels + 1
        cut = depth + 2 > DEEPEST
        assert (inner, levels) == ((None, DEEPEST - 1) if cut else ({"]": "}"}, depth))


@pytest.mark.parametrize("text", ["", "[", "[" * 5000, '{"a": "', "[" * 5000 + "]" * 5001])
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        loads(text.encode())
