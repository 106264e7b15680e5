"""What stands under the fields of a model, for its schema.

Pydantic can read it, too (`use_attribute_docstrings`), and does when a class is made: a third of what the operator's
start takes, for texts that it never tells.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def field_texts(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings of the model's fields, those that it inherits among them."""
    texts: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, BaseModel) and each is not BaseModel:
            texts |= _own(each)
    return texts


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module as they are written; `inspect.getsource` of a class would read all of it each time."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def _own(model: type[BaseModel]) -> Mapping[str, str]:
    defined = _classes(model.__module__)[model.__name__]
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(defined.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
