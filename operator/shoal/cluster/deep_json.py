"""Reads JSON that somebody has nested more deeply than parsers go.

Whoever may write an object may do that, and what came with it in one answer is read all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

DEEPEST = 400
"""What lies deeper is left out. pydantic's parser gives up at 200, so that what was cut is no readable object, and
Python's own at about 1,000."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def loads(text: bytes) -> Any:
    """What the text says, with null in place of each list or map that lies deeper than `DEEPEST`.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(b"".join(_cut(text)))


def _cut(text: bytes) -> Iterator[bytes]:
    depth = begin = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case b"[" | b"{":
                depth += 1
                if depth == DEEPEST + 1:
                    yield text[begin : token.start()] + b"null"
            case b"]" | b"}":
                if depth == DEEPEST + 1:
                    begin = token.end()
                depth -= 1
    if depth <= DEEPEST:
        yield text[begin:]
