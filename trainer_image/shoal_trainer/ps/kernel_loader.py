"""Runs the compiled kernels without Numba, which would take more memory than the rest of a small parameter server.

A child process compiles all kernels to object code (`kernel_compiler`). The code is kept in `$SHOAL_KERNELS`, or in the
user's cache folder, by the hash of all that it depends on, and LLVM loads it. The image build compiles ahead of time
with `python -m shoal_trainer.ps.kernel_loader`, for a processor that every node of a cloud is at least.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import inspect
import logging
import os
import platform
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
import numpy as np

from shoal_trainer.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

FOLDER_ENV = "SHOAL_KERNELS"
OF_EVERY_NODE = {"x86_64": "haswell", "aarch64": "neoverse-n1"}
"""What an image's kernels are compiled for: code for the machine that built it is useless on another one. `haswell` is
the level x86-64-v3 (AVX2, FMA), which all cloud x86 nodes have had since 2015."""
ENCODINGS = "float32", "uint16"
RULES = "kernels", "lookahead"
"""The modules that declare kernels."""
KERNELS: dict[str, Kernel[Any, Any]] = {}
SUMS = 3
"""The length of an array of results."""


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
    def is_written(self) -> bool:
        """Whether the kernel changes it."""
        return not self.kind.startswith("Const")

    def dtype(self, encoding: str) -> str:
        """The type of its values, if those in buffers have the type `encoding`."""
        if self.kind == "Sums":
            return "float64"
        return encoding if self.kind.endswith("Buffer") else "float32"


class _Array(NamedTuple):
    """What compiled code needs of an array. `size`: None for that of the buffer."""

    name: str
    dtype: np.dtype[Any]
    size: int | None
    is_written: bool

    def address(self, value: Any, n: int) -> int:
        """The address of an array. `TypeError` if compiled code cannot use it."""
        size, flags = n if self.size is None else self.size, value.flags
        usable = flags.carray if self.is_written else flags.c_contiguous and flags.aligned
        if value.dtype != self.dtype or value.size != size or not usable:
            need = "contiguous, aligned and writeable" if self.is_written else "contiguous and aligned"
            raise TypeError(
                f"{self.name}: {value.size} values of {value.dtype} where {size} of {self.dtype} are needed, {need}"
            )
        if self.is_written and size:
            return ctypes.addressof(ctypes.c_char.from_buffer(value))  # several times as fast as what follows
        address: int = value.ctypes.data
        return address


class _Code(NamedTuple):
    """A kernel's code for one encoding."""

    function: Callable[..., Any]
    arrays: tuple[_Array | None, ...]
    """None for numbers."""


class Kernel(Generic[P, R]):
    """A rule, and its compiled code for both encodings, which runs without the GIL."""

    def __init__(self, rule: Callable[Concatenate[int, P], R], *, any_order: bool = False) -> None:
        self.rule, self.any_order = rule, any_order
        functools.update_wrapper(self, rule)
        self.name = rule.__name__
        hints = inspect.get_annotations(rule)
        self.returns_bool = hints.pop("return") == "bool"
        self.parameters = [Parameter(name, kind) for name, kind in hints.items()][1:]
        self._buffer = next(i for i, p in enumerate(self.parameters) if p.kind.endswith("Buffer"))
        self._code: dict[np.dtype[Any], _Code] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the compiled rule; loads it on first use. `TypeError` for arrays that it cannot use."""
        if kwargs:
            raise TypeError("kernels take their arguments by position")
        values: tuple[Any, ...] = args
        buffer = values[self._buffer]
        code = self._code.get(buffer.dtype) or self._load(buffer.dtype)
        n = buffer.size
        result = code.function(
            n,
            *[
                value if array is None else array.address(value, n)
                for value, array in zip(values, code.arrays, strict=True)
            ],
        )
        return bool(result) if self.returns_bool else result  # type: ignore[return-value]

    def symbol(self, encoding: str) -> str:
        """The name of its function in the object code."""
        return f"{self.name}_{encoding}"

    def _load(self, dtype: np.dtype[Any]) -> _Code:
        encoding = dtype.name
        if encoding not in ENCODINGS:
            raise TypeError(f"buffers have values of {' or '.join(ENCODINGS)}, not of {encoding}")
        arrays = tuple(
            _Array(p.name, np.dtype(p.dtype(encoding)), SUMS if p.kind == "Sums" else None, p.is_written)
            if p.is_array
            else None
            for p in self.parameters
        )
        kinds = [ctypes.c_void_p if p.is_array else ctypes.c_float for p in self.parameters]
        prototype = ctypes.CFUNCTYPE(ctypes.c_uint8 if self.returns_bool else None, ctypes.c_int64, *kinds)
        code = _Code(prototype(_engine().get_function_address(self.symbol(encoding))), arrays)
        self._code[dtype] = code
        return code


def kernel(rule: Callable[Concatenate[int, P], R]) -> Kernel[P, R]:
    """The rule as a kernel, called without `n`. Annotations name the kinds of its parameters."""
    return _declared(Kernel(rule))


def reduction(rule: Callable[Concatenate[int, P], R]) -> Kernel[P, R]:
    """As `kernel`, of a rule whose sums may be made in any order: that of one would forbid vector instructions."""
    return _declared(Kernel(rule, any_order=True))


def _declared(made: Kernel[P, R]) -> Kernel[P, R]:
    KERNELS[made.name] = made
    return made


# --- object code --------------------------------------------------------------------------------------------------

_lock = threading.Lock()


def load_kernels() -> None:
    """Load the compiled kernels, so that the first push does not wait for it."""
    declare_kernels()
    _engine()


def declare_kernels() -> None:
    """Import what declares kernels, so that `KERNELS` has all of them."""
    for name in RULES:
        importlib.import_module(f"shoal_trainer.ps.{name}")


def _engine() -> Any:
    with _lock:
        return _load()


@functools.cache  # it owns the memory of the code
def _load() -> Any:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code()))
    engine.finalize_object()
    return engine


def _object_code() -> bytes:
    path = cached_file()
    if (code := _read(path)) is None:
        with _exclusive(path):
            if (code := _read(path)) is None:
                code = _compile()
                _save(path, code)
    return code


def target_machine() -> Any:
    """LLVM's description of the processor for which kernels are compiled."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = target()
    made = llvm.Target.from_default_triple().create_target_machine
    return made(cpu=cpu, features=features, opt=3, reloc="static", codemodel="jitdefault", jit=True)


def target() -> tuple[str, str]:
    """Name and features of the processor: Numba's variables, in an image OF_EVERY_NODE, or this machine's."""
    if FOLDER_ENV in os.environ and (common := OF_EVERY_NODE.get(platform.machine())):
        default = common, ""
    else:
        default = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    cpu, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    return cpu or default[0], default[1] if features is None else features


def cached_file() -> Path | None:
    """Where the code is kept; None if this user has no folder for it."""
    if folder := os.environ.get(FOLDER_ENV):
        return Path(folder) / _key()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "shoal" / "kernels" / _key()


def _key() -> str:
    here = Path(__file__).parent
    sources = [
        (here / f"{name}.py").read_bytes() for name in (*RULES, "scalars", "kernel_compiler", "kernel_loader")
    ]
    facts = [version("numba"), version("llvmlite"), llvm.get_process_triple(), *target()]
    return hashlib.sha256(b"\0".join([*sources, *(text.encode() for text in facts)])).hexdigest()[:20] + ".o"


@contextlib.contextmanager
def _exclusive(path: Path | None) -> Iterator[None]:
    """Let one process compile while others wait for it; where no file can be locked, each is on its own."""
    with contextlib.ExitStack() as stack:
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.with_suffix(".lock").open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("compiling without a lock: %s", error)
        yield


def _read(path: Path | None) -> bytes | None:
    """The code in a file, if it is complete."""
    if path is None:
        return None
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _save(path: Path | None, code: bytes) -> None:
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(hashlib.sha256(code).digest() + code)
        part.replace(path)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _compile() -> bytes:
    begin = time.monotonic()
    cpu, features = target()
    log.info("compiling the update kernels for %s", cpu)
    # Other variables of Numba change the code, and modules in the current folder could hide its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shoal_trainer.ps.kernel_compiler", str(out.fileno())],
            env=environment,
            pass_fds=[out.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip()
            log.debug("%s", text)
            last = text.splitlines()[-1] if text else f"exit code {done.returncode}"
            raise UserError(f"the update kernels cannot be compiled for {cpu}: {last}")
        out.seek(0)
        log.info("compiled the update kernels in %.1f s", time.monotonic() - begin)
        return out.read()


def main() -> int:
    """Compile ahead of time; fails if the code is not kept."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    load_kernels()
    path = cached_file()
    return 0 if path is not None and path.exists() else 1


if __name__ == "__main__":
    # As a script this file is `__main__`; kernels are registered in the imported module.
    from shoal_trainer.ps import kernel_loader  # noqa: PLW0406

    sys.exit(kernel_loader.main())
