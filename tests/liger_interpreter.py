"""Runs Liger's kernels on a CPU: Triton's interpreter, with what it gets wrong put right.

Import this before anything that imports Triton, in a process of its own: it sets ``TRITON_INTERPRET`` and changes the
interpreter for the whole process. Written for triton 3.7 to 3.9 and liger-kernel 0.8.5; ``install()`` is called on import.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def _is_bf16(handle):
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle):
    """bf16 bit patterns (uint16) as fp32."""
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(handle):
    """fp32 as bf16 bit patterns, rounded to nearest, ties to even."""
    x = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(x), np.uint16(0x7FC0), rounded), tl.bfloat16)


def _scalars_are_fp32():
    """Python floats become fp32 tensors, as the compiler types them; the kernels call ``.to`` on them."""
    original = interpreter._implicit_cvt

    def convert(arg):
        if type(arg) is float:
            return tl.tensor(Handle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return original(arg)

    interpreter._implicit_cvt = convert


_BINARY = [
    "fadd",
    "fmul",
    "fdiv",
    "fsub",
    "frem",
    "precise_divf",
    "approx_divf",
    "minimumf",
    "minnumf",
    "maximumf",
    "maxnumf",
]
_UNARY = ["fneg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "erf", "precise_sqrt"]


def _bf16_arithmetic():
    """The interpreter computes on the bit patterns; compute in fp32 and round."""

    def binary(name, comparison):
        original = getattr(Builder, name)

        def call(self, left, right):
            if not (_is_bf16(left) or _is_bf16(right)):
                return original(self, left, right)
            left = _widen(left) if _is_bf16(left) else left
            right = _widen(right) if _is_bf16(right) else right
            out = original(self, left, right)
            return Handle(out.data.astype(bool), tl.int1) if comparison else _narrow(out)

        setattr(Builder, name, call)

    def unary(name):
        original = getattr(Builder, name)

        def call(self, arg):
            return _narrow(original(self, _widen(arg))) if _is_bf16(arg) else original(self, arg)

        setattr(Builder, name, call)

    for name in _BINARY:
        if hasattr(Builder, f"create_{name}"):
            binary(f"create_{name}", comparison=False)
    for name in [n for n in dir(Builder) if n.startswith("create_fcmp")]:
        binary(name, comparison=True)
    for name in _UNARY:
        if hasattr(Builder, f"create_{name}"):
            unary(f"create_{name}")
    fma = Builder.create_fma

    def fused(self, x, y, z):
        if _is_bf16(z):
            return _narrow(fma(self, _widen(x), _widen(y), _widen(z)))
        return fma(self, x, y, z)

    dot = Builder.create_dot

    def product(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (_widen(x) if _is_bf16(x) else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    Builder.create_fma = fused
    Builder.create_dot = product


def _bf16_casts():
    """fp32 to bf16 rounds to nearest, as the hardware does."""
    cast_impl, to_float = Builder.cast_impl, Builder.create_fp_to_fp

    def cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            wide = _widen(src)
            return wide if target == tl.float32 else cast_impl(self, wide, dst_type)
        if target == tl.bfloat16 and source != tl.bfloat16:
            return _narrow(src if source == tl.float32 else cast_impl(self, src, tl.float32))
        return cast_impl(self, src, dst_type)

    def convert(self, src, dst, rounding):
        if tl.bfloat16 in (src.dtype.scalar, dst.scalar):
            return cast(self, src, dst)
        return to_float(self, src, dst, rounding)

    def constant(self, value):
        return _narrow(Handle(np.array([value], dtype=np.float32), tl.float32))

    Builder.get_bf16 = constant
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = convert


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x.to(tl.float32)) - 1


@triton.jit
def _rsqrt(x):
    return 1 / tl.sqrt(x.to(tl.float32))


def _bf16_atomics():
    """Program instances run one after another, so an addition need not be atomic."""
    original = Builder.create_atomic_rmw
    # how many cache hints these take differs between versions of triton
    load_hints = [None] * (len(inspect.signature(Builder.create_masked_load).parameters) - 4) + [False]
    store_hints = [None] * (len(inspect.signature(Builder.create_masked_store).parameters) - 4)

    def add(self, op, ptr, val, mask, *order):
        if not _is_bf16(val):
            return original(self, op, ptr, val, mask, *order)
        before = self.create_masked_load(ptr, mask, *load_hints)
        self.create_masked_store(ptr, self.create_fadd(before, val), mask, *store_hints)
        return before

    Builder.create_atomic_rmw = add


def _device_functions():
    """libdevice has no CPU side."""
    for module_name in ("geglu", "cross_entropy", "rms_norm", "layer_norm", "fused_add_rms_norm"):
        module = importlib.import_module(f"liger_kernel.ops.{module_name}")
        for name, function in (("tanh", _tanh), ("rsqrt", _rsqrt)):
            if hasattr(module, name):
                setattr(module, name, function)


def _once_per_launch():
    """A device function is prepared once per launch, not at every call: nearly half of the time goes there otherwise."""
    run, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    prepared = []

    def launch(self, *args, **kwargs):
        prepared.append(set())
        try:
            return run(self, *args, **kwargs)
        finally:
            prepared.pop()

    def device_function(self, *args, **kwargs):
        if not prepared or self.fn not in prepared[-1]:
            if prepared:
                prepared[-1].add(self.fn)
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = device_function


def _quick_sorting():
    """``tl.sort`` is built from reductions by exclusive or, which the interpreter does number by number."""
    original = interpreter.ReduceOps.apply_impl

    def apply(self, input):
        if self.combine_fn == tl.standard._xor_combine:
            data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, input[0].dtype)
        return original(self, input)

    interpreter.ReduceOps.apply_impl = apply


def _no_overflow_checks():
    """Every integer operation is done twice to look for overflows, which only an assertion would tell."""
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def install():
    _once_per_launch()
    _quick_sorting()
    _no_overflow_checks()
    _scalars_are_fp32()
    _bf16_arithmetic()
    _bf16_casts()
    _bf16_atomics()
    _device_functions()


install()
