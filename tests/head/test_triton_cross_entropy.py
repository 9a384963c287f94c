"""The Triton kernel, run by Triton's interpreter: the same losses and gradients as PyTorch, on any machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from itertools import product

import pytest
import torch
import torch.nn.functional as F

TAILS = ((), (0.5,), (1 / 3, "tanh", 3.0))


def check(tail_spec: tuple[float | str, ...], smoothing: float, reduction: str, with_bias: bool) -> None:
    """Compare one combination on rows that need several chunks and a second backward."""
    from lightning_liger.head import chunks, triton_cross_entropy
    from lightning_liger.head import linear_cross_entropy as module
    from lightning_liger.head.tail import TailOp, apply_tail

    chunks._MIN_ROWS["cpu"], chunks._CHUNK_BYTES["cpu"] = 8, 16
    triton_cross_entropy._BLOCK = 16  # several blocks to a row, the last one not full
    tail = tuple(TailOp("tanh") if step == "tanh" else TailOp("scale", float(step)) for step in tail_spec)
    rows = torch.randn(19, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    bias = torch.randn(50, requires_grad=True) if with_bias else None
    target = torch.randint(0, 50, (19,))
    leaves = [t for t in (rows, weight, bias) if t is not None]
    logits = apply_tail(F.linear(rows, weight, bias), tail)
    plain = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    grad = torch.randn(19) if reduction == "none" else torch.tensor(1.7)
    expected = torch.autograd.grad(plain, leaves, grad)
    fused = module.linear_cross_entropy(
        rows, weight, bias, target, tail=tail, label_smoothing=smoothing, reduction=reduction, backend="triton"
    )
    first = torch.autograd.grad(fused, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(fused, leaves, grad)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    for found in (first, second):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def check_odd_rows() -> None:
    """Rows whose first block says nothing about the others."""
    from lightning_liger.head.triton_cross_entropy import cross_entropy_in_place

    low = float("-inf")
    rows = torch.randn(6, 50)
    rows[0, :16] = -300.0  # overflows unless it is swept again
    rows[1, :16] = low
    rows[2, 20:] = low
    rows[3, 40] = 1e4
    rows[4] = low
    rows[5, 7] = float("nan")
    target = torch.tensor([30, 30, 3, 40, 2, 2])
    leaf = rows.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    found = cross_entropy_in_place(rows, target)
    torch.testing.assert_close(found, expected.detach(), equal_nan=True)
    torch.testing.assert_close(rows, gradient, equal_nan=True)


def _interprets_loops() -> bool:
    """Interpreters before 3.9 stumble over a loop bound that is a kernel argument."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)


@pytest.mark.skipif(not _interprets_loops(), reason="needs the interpreter of triton 3.9")
def test_interpreted_kernel_equals_pytorch() -> None:
    # The variable must be set before triton is imported, and must not reach the other tests.
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "36 combinations"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("tanh", [False, True])
def test_kernels_compile_for_a_gpu(tanh: bool) -> None:
    """Without one: down to machine code of compute capability 9.0, with no register spilled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_liger.head import triton_cross_entropy as module

    types = dict.fromkeys(("logits_ptr", "target_ptr", "loss_ptr", "scale_ptr"), "*fp32")
    types |= {"logits_ptr": "*bf16", "target_ptr": "*i64", "row_stride": "i64", "n_cols": "i32"}
    constants = {"HAS_TANH": tanh, "HAS_SCALE": tanh, "SMOOTH": tanh, "WANT_GRADIENT": True, "BLOCK": 8192}
    names = module._cross_entropy_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "fp32") for n in names}
    source = ASTSource(
        fn=module._cross_entropy_kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert "cubin" in made.asm and ".local" not in made.asm["ptx"]


if __name__ == "__main__":
    torch.manual_seed(0)
    combinations = list(product(TAILS, (0.0, 0.1), ("mean", "sum", "none"), (False, True)))
    for combination in combinations:
        check(*combination)
    check_odd_rows()
    print(f"{len(combinations)} combinations")
