"""Cross entropy of ``rows @ weight.T`` without storing the logits.

For rows ``h_i`` (``(N, H)``), weight ``W`` (``(V, H)``), optional bias ``b`` and an element-wise tail ``f`` such as a
soft-cap, ``z_i = f(W h_i + b)`` and ``loss_i = logsumexp(z_i) - (1 - eps) z_i[t_i] - eps mean(z_i)`` with label
smoothing ``eps``, as :func:`torch.nn.functional.cross_entropy` defines it. Logits exist for one chunk of rows at a
time. For a mean or sum their gradient is taken in the same pass (Liger, arXiv:2410.10989, section 3), so the head costs
three matrix products as in the plain run; for ``reduction="none"`` the chunk is computed again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# One chunk of logits in fp32. Large enough that dW is accumulated few times, small beside the model. On a CPU the
# chunk should stay near the cache, on a GPU it should fill the matrix units.
_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
_MIN_ROWS = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True)
class TailOp:
    """One element-wise step between the head's product and the loss: ``"scale"`` by ``factor`` or ``"tanh"``."""

    kind: str
    factor: float = 1.0


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows per chunk, from a budget of memory rather than from the ratio of vocabulary to hidden size."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return max(_MIN_ROWS[kind], _CHUNK_BYTES[kind] // (4 * vocab))


def apply_tail(logits: Tensor, tail: tuple[TailOp, ...]) -> Tensor:
    for op in tail:
        logits = logits * op.factor if op.kind == "scale" else logits.tanh()
    return logits


def _tail_with_slopes(logits: Tensor, tail: tuple[TailOp, ...]) -> tuple[Tensor, list[Tensor | float]]:
    slopes: list[Tensor | float] = []
    for op in tail:
        if op.kind == "scale":
            logits = logits * op.factor
            slopes.append(op.factor)
        else:
            logits = logits.tanh()
            slopes.append(1 - logits * logits)
    return logits, slopes


def head_product(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows @ weight.T + bias`` computed in ``dtype``, whatever autocast would do."""
    with torch.autocast(rows.device.type, enabled=False):
        cast_bias = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(rows.to(dtype), weight.to(dtype), cast_bias)


def _chunk_loss(
    logits: Tensor, target: Tensor, smoothing: float, row_scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Loss of each row and, when ``row_scale`` is given, ``scale_i * d loss_i / d logits`` (overwrites ``logits``)."""
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, target[:, None])[:, 0]
    loss = lse - picked if not smoothing else lse - (1 - smoothing) * picked - smoothing * logits.mean(-1)
    if row_scale is None:
        return loss, None
    gradient = logits.sub_(lse[:, None]).exp_()
    if smoothing:
        gradient -= smoothing / logits.shape[-1]
    gradient.scatter_add_(-1, target[:, None], torch.full_like(lse, smoothing - 1.0)[:, None])
    gradient *= row_scale if isinstance(row_scale, float) else row_scale[:, None]
    return loss, gradient


class _LinearCrossEntropy(torch.autograd.Function):
    """Returns ``(N,)`` losses (``per_row``) or their sum times ``scale``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        tail: tuple[TailOp, ...],
        smoothing: float,
        scale: float,
        per_row: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.meta = (tail, smoothing, per_row, dtype)
        wanted = tuple(ctx.needs_input_grad[:3])
        want = any(wanted) and not per_row
        losses, gradients = _chunks(rows, weight, bias, target, tail, smoothing, scale if want else None, dtype, wanted)
        if per_row:
            ctx.save_for_backward(rows, weight, bias, target)
            return losses
        ctx.save_for_backward(*gradients)
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tail, smoothing, per_row, dtype = ctx.meta
        if per_row:
            rows, weight, bias, target = ctx.saved_tensors
            wanted = tuple(ctx.needs_input_grad[:3])
            _, gradients = _chunks(rows, weight, bias, target, tail, smoothing, grad.float(), dtype, wanted)
        else:
            # out of place: a second backward over a retained graph must find them unscaled
            gradients = tuple(None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None, None)


def _chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tail: tuple[TailOp, ...],
    smoothing: float,
    scale: Tensor | float | None,
    dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    n, vocab = rows.shape[0], weight.shape[0]
    losses = torch.empty(n, dtype=torch.float32 if dtype != torch.float64 else dtype, device=rows.device)
    weight_c = weight.detach().to(dtype)
    bias_c = None if bias is None else bias.detach().to(dtype)
    want = scale is not None
    d_rows = torch.empty_like(rows) if want and wanted[0] else None
    # fp32 sums even for bf16 weights: adding chunk after chunk in bf16 loses what small gradients say
    sums = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    d_weight = torch.zeros(weight.shape, dtype=sums, device=rows.device) if want and wanted[1] else None
    d_bias = torch.zeros(vocab, dtype=sums, device=rows.device) if want and bias is not None and wanted[2] else None
    step = chunk_rows(vocab, rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            h = rows[part].detach().to(dtype)
            z = torch.nn.functional.linear(h, weight_c, bias_c).to(losses.dtype)
            z, slopes = _tail_with_slopes(z, tail)
            row_scale = scale[part] if isinstance(scale, Tensor) else scale
            losses[part], gradient = _chunk_loss(z, target[part], smoothing, row_scale)
            if gradient is None:
                continue
            for slope in reversed(slopes):
                gradient = gradient * slope
            gradient = gradient.to(dtype)
            if d_rows is not None:
                d_rows[part] = gradient @ weight_c
            if d_weight is not None:
                _add_product(d_weight, gradient, h)
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=sums)
    return losses, (
        d_rows,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def _add_product(total: Tensor, gradient: Tensor, h: Tensor) -> None:
    """``total += gradient.T @ h`` with the sum in ``total``'s dtype."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, h)
    else:
        total += gradient.T @ h


def linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    tail: tuple[TailOp, ...] = (),
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    backend: str = "torch",
) -> Tensor:
    """Cross entropy of a linear head, chunk by chunk.

    Args:
        rows: ``(N, H)`` hidden rows, every one of which counts (ignored ones are left out by the caller).
        weight: ``(V, H)``; ``bias``: ``(V,)`` or None.
        target: ``(N,)`` int64 in ``[0, V)``; not checked here.
        tail: element-wise steps after the product.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean of no rows is NaN with zero gradients, as in PyTorch.
        dtype: dtype of the products; that of ``rows`` by default. Losses and sums are fp32 at least.
        backend: ``"torch"`` or ``"liger"`` (CUDA; falls back to torch for tails it does not know and for ``"none"``).

    Returns:
        A scalar, or ``(N,)`` for ``"none"``, in fp32 (fp64 for fp64 rows).
    """
    dtype = dtype or rows.dtype
    if backend == "liger":
        from lightning_liger.head.liger_backend import liger_linear_cross_entropy, supports

        if supports(tail, reduction, dtype):
            return liger_linear_cross_entropy(rows, weight, bias, target, tail, label_smoothing, reduction, dtype)
    n = rows.shape[0]
    scale = 1.0 / n if reduction == "mean" and n else 1.0
    loss: Tensor = _LinearCrossEntropy.apply(
        rows, weight, bias, target, tail, label_smoothing, scale, reduction == "none", dtype
    )
    return loss * float("nan") if reduction == "mean" and not n else loss
