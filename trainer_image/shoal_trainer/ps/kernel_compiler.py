"""Compiles all kernels with Numba to object code. `kernel_loader` starts it, and passes a file descriptor for it."""

from __future__ import annotations

import os
import sys
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import types as t
from numba.extending import lower_builtin, type_callable

from shoal_trainer.ps import scalars
from shoal_trainer.ps.kernel_loader import ENCODINGS, KERNELS, Kernel, declare_kernels, target_machine

WORD, SINGLE = ir.IntType(32), ir.FloatType()


def compile_kernels() -> bytes:
    """Object code with a function for each kernel and encoding; its arguments are `n`, pointers and numbers."""
    declare_kernels()
    _declare()
    modules = [_module(kernel, encoding) for kernel in KERNELS.values() for encoding in ENCODINGS]
    for module in modules[1:]:
        modules[0].link_in(module)
    code: bytes = target_machine().emit_object(modules[0])
    return code


def _module(kernel: Kernel[Any, Any], encoding: str) -> Any:
    types: Any = t
    parameters = [
        types.CPointer(getattr(types, p.dtype(encoding))) if p.is_array else types.float32
        for p in kernel.parameters
    ]
    signature = (types.uint8 if kernel.returns_bool else types.void)(types.int64, *parameters)
    fast = {"reassoc"} if kernel.any_order else False
    compiled = numba.cfunc(signature, error_model="numpy", fastmath=fast)(kernel.rule)
    module = llvm.parse_assembly(compiled.inspect_llvm())
    module.get_function(compiled.native_name).name = kernel.symbol(encoding)
    return module


# --- the functions for single numbers, as LLVM code -----------------------------------------------------------------


def _declare() -> None:
    """Tell Numba the types and the code of the functions that rules call."""
    type_callable(scalars.widen)(lambda _context: lambda _value: t.float32)
    lower_builtin(scalars.widen, t.float32)(_same)
    lower_builtin(scalars.widen, t.uint16)(_widen)
    type_callable(scalars.narrow)(lambda _context: lambda _value, like: like)
    lower_builtin(scalars.narrow, t.float32, t.float32)(_same)
    lower_builtin(scalars.narrow, t.float32, t.uint16)(_narrow)
    type_callable(scalars.finite_or_zero)(lambda _context: lambda _value: t.float32)
    lower_builtin(scalars.finite_or_zero, t.float32)(_finite_or_zero)
    type_callable(scalars.squarable_or_zero)(lambda _context: lambda _value: t.float32)
    lower_builtin(scalars.squarable_or_zero, t.float32)(_squarable_or_zero)
    type_callable(scalars.mark_change)(lambda _context: lambda _seen, _value, _used: t.uint32)
    lower_builtin(scalars.mark_change, t.uint32, t.float32, t.float32)(_mark_change)


def _same(_context: Any, _builder: Any, _signature: Any, args: Any) -> Any:
    return args[0]


def _widen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(args[0], WORD), WORD(16)), SINGLE)


def _narrow(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    bits = builder.bitcast(args[0], WORD)
    odd = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
    rounded = builder.add(bits, builder.add(odd, WORD(0x7FFF)))
    quiet = builder.or_(bits, WORD(0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, WORD(16)), ir.IntType(16))


def _finite_or_zero(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    below = builder.fcmp_ordered("<", _size(builder, args[0]), SINGLE(float("inf")))
    return builder.select(below, args[0], SINGLE(0.0))


def _squarable_or_zero(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    small = builder.fcmp_ordered("<=", _size(builder, args[0]), SINGLE(float(scalars.LARGEST)))
    return builder.select(small, args[0], SINGLE(0.0))


def _size(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(value, WORD), WORD(0x7FFFFFFF)), SINGLE)


def _mark_change(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.or_(args[0], builder.xor(builder.bitcast(args[1], WORD), builder.bitcast(args[2], WORD)))


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "wb") as file:
        file.write(compile_kernels())
