"""The Python code that travels with a job: in a ConfigMap, file by file or as an archive that Python imports from.

An archive that is too large for a ConfigMap goes into the job's storage, under its digest, and parameter server 0 hands
it to the workers, which have no credentials for the storage.
"""

from __future__ import annotations

import ast
import base64
import difflib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal_trainer.contract import CODE_ARCHIVE

HELP = """{file} has no shoal_trainer.Training. Add one, such as

    from shoal_trainer import Training

    def build():
        ...                      # what makes your model, up to model.compile(...)
        return model

    job = Training(model=build, data=(x, y))     # what fit() gets; callbacks=lambda: [...], validation=...

and take out {fit}. Then `shoal-trainer check {module}:job` says what is missing; docs/keras.md has the rest."""

MAX_BYTES = 900 * 1024
"""A ConfigMap holds 1 MiB, of which the names and the API server's own fields take a part."""


def read(paths: Sequence[str | Path]) -> dict[str, str]:
    """The files by name. A folder stands for the files directly in it or, if it is a package, for all of the package.

    Raises:
        UsageError: a file is missing or no text, or two have one name.
    """
    found: dict[str, str] = {}
    for name, file in (each for path in paths for each in _named(Path(path))):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"cannot read {file}: it is no text: {error.reason}") from error
        if found.get(name, text) != text:
            raise UsageError(
                f"two files are named {name}: put them into packages (folders with an __init__.py)"
            )
        found[name] = text
    return found


def _named(path: Path) -> list[tuple[str, Path]]:
    """The files of one path, with the names that they have in the job."""
    if not path.is_dir():
        return [(path.name, path)]
    path = path.resolve()
    package = (path / "__init__.py").exists()
    files = sorted(path.rglob("*.py") if package else path.glob("*.py"))
    if not files:
        raise UsageError(f"the folder {path} has no Python files")
    return [(each.relative_to(path.parent if package else path).as_posix(), each) for each in files]


def content(files: Mapping[str, str]) -> dict[str, Any] | bytes:
    """What the ConfigMap has. Packages and more than 900 KiB are in an archive, which is the same each time.

    An archive of more than 900 KiB is returned as such.
    """
    size = sum(len(name) + len(text.encode()) for name, text in files.items())
    if size <= MAX_BYTES and not any("/" in name for name in files):
        return {"data": dict(files)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    if buffer.tell() > MAX_BYTES:
        return buffer.getvalue()
    return {"binaryData": {CODE_ARCHIVE: base64.b64encode(buffer.getvalue()).decode()}}


def training_in(file: str, text: str) -> str:
    """The name of the first Training at the top level of a file, or of a function that returns one.

    Raises:
        UsageError: the file is no Python, or has none; the message says how to write one.
    """
    body = _parsed(file, text).body
    called = {"Training"} | {
        alias.asname
        for node in _scope(body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "Training" and alias.asname
    }

    def makes(node: ast.AST | None) -> bool:
        function = node.func if isinstance(node, ast.Call) else None
        return getattr(function, "attr", None) == "Training" or getattr(function, "id", None) in called

    def assigned(nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and makes(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name))

    for node in _scope(body):
        if isinstance(node, ast.FunctionDef):
            inside = [*_scope(node.body)]
            own = set(assigned(inside))
            results = [each.value for each in inside if isinstance(each, ast.Return)]
            if any(makes(each) or (isinstance(each, ast.Name) and each.id in own) for each in results):
                return node.name
        elif name := next(assigned([node]), None):
            return name
    fits = [
        f"line {node.lineno}, which calls fit()"
        for node in (each for statement in body for each in ast.walk(statement))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit"
    ]
    raise UsageError(
        HELP.format(file=file, module=Path(file).stem, fit=" and ".join(fits) or "the call of fit()")
    )


def must_define(file: str, text: str, attribute: str) -> None:
    """Raise UsageError if the file is no Python, or has no such name at its top level. Nothing of it is run."""
    names = set(_bound(_parsed(file, text).body))
    first = attribute.partition(".")[0]
    if first in names or "*" in names:
        return
    close = difflib.get_close_matches(first, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(names)) or 'no names'}"
    raise UsageError(f"{file} has no {first!r} at its top level: {hint}")


def _parsed(file: str, text: str) -> ast.Module:
    try:
        return ast.parse(text, file)
    except SyntaxError as error:
        raise UsageError(f"{file}, line {error.lineno}: {error.msg}") from error


def _scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These nodes and what is in them, but for what has a scope of its own."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _scope(ast.iter_child_nodes(node))


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that these statements bind in their own scope; `*` where they cannot be told."""
    for node in _scope(nodes):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
