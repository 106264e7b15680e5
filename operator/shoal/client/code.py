"""The Python code that travels with a job: in a ConfigMap, file by file or as an archive that Python imports from.

An archive that is too large for a ConfigMap goes into the job's storage, under its digest, and parameter server 0 hands
it to the workers, which have no credentials for the storage.
"""

from __future__ import annotations

import base64
import io
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal_trainer.contract import CODE_ARCHIVE

MAX_BYTES = 900 * 1024
"""A ConfigMap holds 1 MiB, of which the names and the API server's own fields take a part."""
MAX_FILE = 64 << 20
"""No file of code is larger; and of what is no file, such as /dev/zero, the end may never come."""
_NO_CODE = "Code travels with a job; data and models belong in a bucket, a volume, or the image"
_KEY = re.compile(r"(?!\.\.|\.$)[-._a-zA-Z0-9]{1,253}")
"""A name in a ConfigMap."""


def read(paths: Sequence[str | Path]) -> dict[str, str]:
    """The files by name. A folder stands for the files directly in it or, if it is a package, for all of the package.

    Raises:
        UsageError: a file is missing, very large or no text, has a name that only an archive can hold, or two have one
            name.
    """
    found: dict[str, str] = {}
    for name, file in (each for path in paths for each in _named(Path(path))):
        try:
            if not stat.S_ISREG((about := file.stat()).st_mode) or about.st_size > MAX_FILE:
                why = f"it is no file of at most {MAX_FILE >> 20} MiB"
                raise UsageError(f"cannot take {file} along: {why}. {_NO_CODE}")
            text = file.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            why = f"it is no text. {_NO_CODE}"
            if file.suffix == ".py":
                why = "code travels in UTF-8: save it so, without a coding line"
            raise UsageError(f"cannot take {file} along: {why}") from error
        if file.suffix != ".py" and not _KEY.fullmatch(name):
            raise UsageError(
                f"cannot take {file} along: a name in a ConfigMap has only a-z, A-Z, 0-9, '-', '_' and '.': rename it"
            )
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
    """What the ConfigMap has: the files, or an archive of them, which is the same each time.

    In an archive are packages, more than 900 KiB, and modules with names that a ConfigMap may not have. One that is
    itself larger than 900 KiB is returned as such.
    """
    size = sum(len(name) + len(text.encode()) for name, text in files.items())
    if size <= MAX_BYTES and all(map(_KEY.fullmatch, files)):
        return {"data": dict(files)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    if buffer.tell() > MAX_BYTES:
        return buffer.getvalue()
    return {"binaryData": {CODE_ARCHIVE: base64.b64encode(buffer.getvalue()).decode()}}
