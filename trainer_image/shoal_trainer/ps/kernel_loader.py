"""Runs the compiled kernels without Numba, which would take more memory than the rest of a small parameter server.

A child process compiles all kernels to object code (`kernel_compiler`). The code is kept in `$SHOAL_KERNELS`, or in the
user's cache folder, by the hash of all that it depends on, and LLVM loads it. The image build compiles ahead of time
with `python -m shoal_trainer.ps.kernel_loader`, for `$NUMBA_CPU_NAME`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import inspect
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import llvmlite.binding as llvm

from shoal_trainer.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

FOLDER_ENV = "SHOAL_KERNELS"
ENCODINGS = "float32", "uint16"
KERNELS: dict[str, Kernel[Any, Any]] = {}


class Parameter(NamedTuple):
    """A parameter of a kernel: an array of `n` values, an array of results, or an fp32 number."""

    name: str
    kind: str
    """Its annotation."""

    @property
    def is_array(self) -> bool:
        """Whether it is passed as a pointer."""
        return self.kind != "np.float32"

    @property
    def is_result(self) -> bool:
        """Whether its length does not depend on `n`."""
        return self.kind == "Sums"

    def dtype(self, encoding: str) -> str:
        """The type of its values, if those in buffers have the type `encoding`."""
        if self.is_result:
            return "float64"
        return encoding if self.kind.endswith("Buffer") else "float32"

    def refuse(self, value: Any, n: int, encoding: str) -> None:
        """`TypeError` unless `value` is an array that compiled code can use."""
        flags = value.flags
        if (
            value.dtype != self.dtype(encoding)
            or not flags.c_contiguous
            or not (flags.writeable or self.kind.startswith("Const"))
            or not (self.is_result or value.size == n)
        ):
            raise TypeError(
                f"{self.name}: {value.size} values of {value.dtype} where {n} of {self.dtype(encoding)} are "
                f"needed, contiguous{'' if self.kind.startswith('Const') else ' and writeable'}"
            )


class Kernel(Generic[P, R]):
    """A rule, and its compiled code for both encodings."""

    def __init__(self, rule: Callable[Concatenate[int, P], R]) -> None:
        self.rule = rule
        functools.update_wrapper(self, rule)
        self.name = rule.__name__
        hints = inspect.get_annotations(rule)
        self.returns_bool = hints.pop("return") == "bool"
        self.parameters = [Parameter(name, kind) for name, kind in hints.items()][1:]
        self._buffer = next(i for i, p in enumerate(self.parameters) if p.kind.endswith("Buffer"))
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the compiled rule; loads it on first use. `TypeError` for arrays that it cannot use."""
        assert not kwargs, "kernels take their arguments by position"
        values: tuple[Any, ...] = args
        buffer = values[self._buffer]
        n, encoding = buffer.size, buffer.dtype.name
        passed = [n]
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.is_array:
                parameter.refuse(value, n, encoding)
                value = value.ctypes.data  # noqa: PLW2901
            passed.append(value)
        result: R = (self._compiled.get(encoding) or self.load(encoding))(*passed)
        return result

    def symbol(self, encoding: str) -> str:
        """The name of its function in the object code."""
        return f"{self.name}_{encoding}"

    def load(self, encoding: str) -> Callable[..., Any]:
        """The compiled code for buffers of this type, as a function that releases the GIL."""
        if encoding not in ENCODINGS:
            raise TypeError(f"buffers have values of {' or '.join(ENCODINGS)}, not of {encoding}")
        kinds = [ctypes.c_void_p if p.is_array else ctypes.c_float for p in self.parameters]
        prototype = ctypes.CFUNCTYPE(ctypes.c_bool if self.returns_bool else None, ctypes.c_int64, *kinds)
        self._compiled[encoding] = prototype(_engine().get_function_address(self.symbol(encoding)))
        return self._compiled[encoding]


def kernel(rule: Callable[Concatenate[int, P], R]) -> Kernel[P, R]:
    """The rule as a kernel, called without `n`. Annotations name the kinds of its parameters."""
    made = Kernel(rule)
    KERNELS[made.name] = made
    return made


# --- object code --------------------------------------------------------------------------------------------------

_lock = threading.Lock()


def load_kernels() -> None:
    """Load the compiled kernels, so that the first push does not wait for it."""
    _engine()


def _engine() -> Any:
    with _lock:
        return _load()


@functools.cache  # it owns the memory of the code
def _load() -> Any:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(object_code()))
    engine.finalize_object()
    return engine


def target_machine() -> Any:
    """LLVM's description of the processor for which kernels are compiled."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = target()
    made = llvm.Target.from_default_triple().create_target_machine
    return made(cpu=cpu, features=features, opt=3, reloc="static", codemodel="jitdefault", jit=True)


def target() -> tuple[str, str]:
    """Name and features of the processor: Numba's variables, or those of this machine."""
    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    return cpu, llvm.get_host_cpu_features().flatten() if features is None else features


def object_code() -> bytes:
    """All kernels, from the cache or compiled now."""
    path = folder() / f"{_key()}.o"
    with _exclusive(path.with_suffix(".lock")):
        code = _read(path)
        if code is None:
            code = _compile()
            _save(path, code)
    return code


def folder() -> Path:
    """The cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER_ENV) or Path(cache) / "shoal" / "kernels")


def _key() -> str:
    here = Path(__file__).parent
    sources = [
        (here / name).read_bytes() for name in ("kernels.py", "kernel_compiler.py", "kernel_loader.py")
    ]
    versions = [version("numba"), version("llvmlite"), *target()]
    return hashlib.sha256(b"\0".join([*sources, *(text.encode() for text in versions)])).hexdigest()[:20]


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Let one process compile while others wait for it; where nothing can be written, each is on its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> bytes | None:
    """The code in a file, if it is complete."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _save(path: Path, code: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)


def _compile() -> bytes:
    begin = time.monotonic()
    log.info("compiling the update kernels for %s", target()[0])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "shoal_trainer.ps.kernel_compiler"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise UserError(f"the update kernels cannot be compiled for {target()[0]}: {last[0]}")
    log.info("compiled the update kernels in %.1f s", time.monotonic() - begin)
    return done.stdout


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    object_code()
