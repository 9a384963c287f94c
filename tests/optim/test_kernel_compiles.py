"""The optimizer's kernels, compiled for a GPU that need not be there: they compile, and move 16 bytes at a time."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under the interpreter", allow_module_level=True)

from lightning_liger.optim import kernel  # noqa: E402


def assembly(function: Any, **constants: Any) -> str:
    """PTX for compute capability 9.0, of arguments that are pointers except for ``constants``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(function.arg_names)
    kinds = {
        "tensors": "*i64",
        "turns": "*i64",
        "rows": "*fp32",
        "chunks": "*i32",
        "factor_ptr": "*fp32",
        "sums": "*fp32",
    }
    sizes = {name: getattr(kernel, name) for name in ("CHUNK", "BLOCK", "ENTRY", "TURN", "ROW") if name in names}
    source = ASTSource(
        fn=function,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in {**sizes, **constants}.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in kinds},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS})
    return str(compiled.asm["ptx"])


def wide(ptx: str) -> tuple[int, int]:
    """Loads and stores of 16 bytes."""
    return len(re.findall(r"ld\.global\S*v4", ptx)), len(re.findall(r"st\.global\S*v4", ptx))


# each thread has eight entries of a block: two loads of fp32, one of bf16
@pytest.mark.parametrize(
    ("dtype", "bf16_state", "loads", "stores"),
    [(torch.float32, True, 6, 4), (torch.float32, False, 8, 6), (torch.bfloat16, True, 4, 3)],
)
def test_the_step_is_wide(dtype: torch.dtype, bf16_state: bool, loads: int, stores: int) -> None:
    moments = triton.language.uint16 if bf16_state else triton.language.float32
    options = {"P": kernel._DTYPES[dtype], "S": moments, "BF16_STATE": bf16_state, "ALIGNED": True}
    assert wide(assembly(kernel._adam_kernel, CLIP=True, WRITE_GRADIENT=False, **options)) == (loads, stores)


@pytest.mark.parametrize("options", [{"CLIP": False, "WRITE_GRADIENT": False}, {"CLIP": True, "WRITE_GRADIENT": True}])
def test_the_step_compiles_for_any_address(options: dict[str, bool]) -> None:
    float32 = triton.language.float32
    ptx = assembly(kernel._adam_kernel, P=float32, S=triton.language.uint16, BF16_STATE=True, ALIGNED=False, **options)
    assert wide(ptx) == (0, 0)


def test_the_sum_of_squares_is_wide() -> None:
    assert wide(assembly(kernel._squares_kernel, P=triton.language.float32, ALIGNED=True))[0] == 2
    assert wide(assembly(kernel._squares_kernel, P=triton.language.float32, ALIGNED=False))[0] == 0
