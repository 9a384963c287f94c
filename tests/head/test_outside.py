"""Copies of logits, and logits that leave PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lazy_cases import case
from torch import Tensor


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is Tensor
    return loaded


OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "save": saved,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: repr(x.cumsum(-1)),
    "item": lambda x: x[0, 0, 0].item(),
    "format": lambda x: f"{x.mean():.6f}",
    "iter": lambda x: [float(r.sum()) for r in x],
    "share": lambda x: x.untyped_storage().nbytes(),
    "any": lambda x: bool(x.isnan().any()),
    "dlpack": lambda x: torch.from_dlpack(x),
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_the_outside_world(name: str) -> None:
    c = case()
    with torch.no_grad():
        expected, found = OUTSIDE[name](c.ordinary()), OUTSIDE[name](c.lazy())
    if isinstance(expected, str | bool | int):
        assert found == expected
    else:
        assert np.allclose(np.asarray(found), np.asarray(expected))


def test_print() -> None:
    assert "grad_fn" in repr(case().lazy())


def test_questions_compute_nothing() -> None:
    """FSDP looks at ``_base`` of whatever a module returns, hooks at ``grad_fn``, code at shapes and devices."""
    c = case()
    x = c.lazy()
    assert x._base is None and not x._is_view() and x.grad_fn is not None and x.requires_grad and not x.is_leaf
    assert x.shape == (3, 5, 9) and x.numel() == 135 and x.dtype == torch.float64 and len(x) == 3
    assert x.is_contiguous() and x.stride(-1) == 1 and x.device.type == "cpu" and x.is_floating_point()
    assert isinstance(hash(x), int) and x.is_same_size(x)
    assert c.report.materialised_by == {}
