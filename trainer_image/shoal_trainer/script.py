"""What the command lines of the trainer and of the operator share: so it is here, and imports neither.

What a Python file defines and imports, read and not run (which of its names is the `Training`, what lies beside it),
and how an argument and a target are typed.
"""

from __future__ import annotations

import ast
import difflib
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

from pydantic import JsonValue

HELP = """{file} has no shoal_trainer.Training. Add one, such as

    from shoal_trainer import Training

    def build():
        ...                      # what makes your model, up to model.compile(...)
        return model

    job = Training(model=build, data=(x, y))     # what fit() gets; callbacks=lambda: [...], validation=...

and {fit}. Then `shoal-trainer check {file}` says what is missing; docs/keras.md has the rest."""
_GUARD = "`if __name__ == '__main__':`"


def module_of(file: str) -> str:
    """The name by which a file is imported.

    Raises:
        ValueError: it has none; the message says how to name the file.
    """
    name = Path(file).stem
    if name.isascii() and name.isidentifier() and not keyword.iskeyword(name):
        return name
    better = re.sub(r"\W", "_", name, flags=re.ASCII)
    better = better if better.isidentifier() and not keyword.iskeyword(better) else f"job_{better}"
    raise ValueError(f"Python cannot import {file} by its name: rename it, for example to {better}.py")


def no_entrypoint(text: str) -> str:
    """What is to be said of text that names no file and no object of a module."""
    words = f"{text!r} must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT, for example digits.py:job"
    notebook = text.partition(":")[0]
    if notebook.endswith(".ipynb"):
        words += f"; `jupyter nbconvert --to script {notebook}` makes a file of a notebook"
    return words


def training_in(file: str, text: str | bytes) -> str:
    """The name of the Training at the top level of a file, or of a function that returns one.

    `job` is taken first. Names that begin with an underscore are none, nor are functions where there are objects.

    Raises:
        ValueError: the file is no Python, or has none, or several; the message says what to do.
    """
    body, guarded = _importable(_parsed(file, text))
    objects, functions = _trainings(body)
    named = list(dict.fromkeys(objects or functions))
    if "job" in (*objects, *functions):
        return "job"
    if len(named) == 1:
        return named[0]
    if named:
        raise ValueError(f"{file} has {', '.join(named)}: say which, for example {file}:{named[0]}")
    for name, node in _named_in(guarded):
        if name in _trainings(guarded)[0]:
            raise ValueError(_only_as_a_program(file, node.lineno, name))
    fits = sorted({node.lineno for node in _scope(body) if _trains(node)})
    fit = f"leave fit() only under {_GUARD}, where it may stay"
    if fits:
        lines = " or ".join(map(str, fits))
        fit = f"take out the call of fit() that trains it (line {lines}), or put it under {_GUARD}"
    raise ValueError(HELP.format(file=file, fit=fit))


def imports(tree: ast.AST) -> set[str]:
    """The top-level names of what is imported anywhere in a file."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def beside(script: Path) -> list[Path]:
    """The modules and packages in a script's folder that it imports, itself or through each other.

    Python finds them when the script runs here, and so they belong to it.

    Raises:
        ValueError: one of them is no Python.
    """
    found, unread = list[Path](), [script]
    while unread:
        file = unread.pop()
        for name in sorted(imports(_parsed(str(file), file.read_bytes()))):
            module, package = script.with_name(f"{name}.py"), script.with_name(name)
            near = package if (package / "__init__.py").is_file() else module
            if near.exists() and near != script and near not in found:
                found.append(near)
                unread += python_files(near)
    return sorted(found)


def python_files(path: Path) -> list[Path]:
    """The file, or all files of the package."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _trainings(body: list[ast.stmt]) -> tuple[list[str], list[str]]:
    """The names of Trainings, and of functions that return one."""
    makers = {"Training"} | {
        alias.asname
        for node in _scope(body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "Training" and alias.asname
    }

    def is_training(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Attribute | ast.Name) and (
            node.attr == "Training" if isinstance(node, ast.Attribute) else node.id in makers
        )

    def makes(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Call) and is_training(node.func)

    def assigned(nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and makes(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name))

    objects: list[str] = []
    functions: list[str] = []
    for node in _scope(body):
        if isinstance(node, ast.FunctionDef):
            inside = [*_scope(node.body)]
            own = set(assigned(inside))
            results = [each.value for each in inside if isinstance(each, ast.Return)]
            returns = any(makes(each) or (isinstance(each, ast.Name) and each.id in own) for each in results)
            if returns or is_training(node.returns):
                functions.append(node.name)
                makers.add(node.name)
        else:
            objects.extend(assigned([node]))
    return _public(objects), _public(functions)


def _public(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def must_define(file: str, text: str | bytes, attribute: str) -> None:
    """Raise ValueError if the file is no Python, or has no such name at its top level. Nothing of it is run."""
    body, guarded = _importable(_parsed(file, text))
    names = {name for name, _ in _named_in(body)}
    first = attribute.partition(".")[0]
    if first in names or "*" in names:
        return
    for name, node in _named_in(guarded):
        if name == first:
            raise ValueError(_only_as_a_program(file, node.lineno, name))
    close = difflib.get_close_matches(first, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(names)) or 'no names'}"
    raise ValueError(f"{file} has no {first!r} at its top level: {hint}")


def must_take_arguments(file: str, text: str | bytes, attribute: str, given: Iterable[str]) -> None:
    """Raise ValueError if the name is a Training, which takes no arguments, or a function that takes none of a name."""
    body = _parsed(file, text).body
    if attribute in _trainings(body)[0]:
        raise ValueError(
            f"{file}:{attribute} is a Training, which takes no arguments: make it a function that returns one, such as "
            f"def {attribute}(rate): …, or leave the arguments out"
        )
    match [node for name, node in _named_in(body) if name == attribute]:
        case [ast.FunctionDef(decorator_list=[], args=ast.arguments(kwarg=None) as taken)]:
            names = [each.arg for each in (*taken.args, *taken.kwonlyargs)]
            for each in given:
                if each not in names:
                    close = difflib.get_close_matches(each, names, n=1)
                    hint = f": did you mean {close[0]}?" if close else ""
                    raise ValueError(
                        f"{file}:{attribute} takes no {each!r}, but {', '.join(names) or 'nothing'}{hint}"
                    )


def _parsed(file: str, text: str | bytes) -> ast.Module:
    """Bytes are read as Python reads them: a mark of UTF-8 and a coding line count."""
    try:
        return ast.parse(text, file)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}") from error


def _scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These nodes and what is in them, but for what has a scope of its own."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _scope(ast.iter_child_nodes(node))


def _named_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.stmt | ast.expr | ast.alias]]:
    """The names that these statements bind in their own scope, and where; `*` where they cannot be told."""
    for node in _scope(nodes):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0], node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node


def _importable(tree: ast.Module) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements that run at an import, and those that run only as a program: `if __name__ == "__main__"`."""
    body, guarded = list[ast.stmt](), list[ast.stmt]()
    for each in tree.body:
        if isinstance(each, ast.If) and re.fullmatch(
            r"__name__ == '__main__'|'__main__' == __name__", ast.unparse(each.test)
        ):
            guarded += each.body
            body += each.orelse
        else:
            body.append(each)
    return body, guarded


def _only_as_a_program(file: str, line: int, name: str) -> str:
    return (
        f"{file}, line {line}: {name} is under {_GUARD}, which runs only where the file is the program: move it out, "
        "to the top level"
    )


def _trains(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it is a call of a model's `fit`, as far as can be told: a scaler's, say, takes the data alone."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "fit"
        and (len(node.args) > 1 or bool(node.keywords))
    )


def argument(text: str) -> tuple[str, JsonValue]:
    """An argument of the entrypoint, of a command line (NAME=VALUE), as a TrainingJob has it.

    A value of JSON (`n=5`, `rate=0.1`, `on=true`, `layers=[64, 32]`, `n="5"`), and any other text as it was typed:
    `relu`, `007`. So are numbers that JSON would write otherwise (`1.10`, `1e-3`): they arrive as floats, or as they
    are where the entrypoint wants text.

    Raises:
        ValueError: it has no name, or is null, which a manifest cannot hold.
    """
    name, equals, typed = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} must be NAME=VALUE")
    try:
        value: JsonValue = json.loads(typed)
        written = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return name, typed
    if value is None:
        raise ValueError(f"{text!r}: Kubernetes drops null: leave {name} out, so that its default counts")
    if isinstance(value, float) and (value.is_integer() or written != typed):
        return name, typed
    if isinstance(value, int) and abs(value) >= 1 << 63:  # the API server would make a float of it
        return name, typed
    return name, value


def target(text: str) -> tuple[str, float]:
    """The metric and the value of `--until METRIC=VALUE`.

    Raises:
        ValueError: it is no such text.
    """
    metric, _, typed = (part.strip() for part in text.partition("="))
    try:
        value = float(typed)
    except ValueError:
        value = math.nan
    if not metric or metric[-1] in "<>" or not math.isfinite(value):
        raise ValueError(f"{text!r} must be METRIC=VALUE with a number, for example val_accuracy=0.97")
    return metric, value
