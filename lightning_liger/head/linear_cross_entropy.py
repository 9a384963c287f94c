"""Cross entropy of ``rows @ weight.T`` without storing the logits.

For rows ``h_i`` (``(N, H)``), weight ``W`` (``(V, H)``), optional bias ``b`` and an element-wise tail ``f`` such as a
soft-cap, ``z_i = f(W h_i + b)`` and ``loss_i = logsumexp(z_i) - (1 - eps) z_i[t_i] - eps mean(z_i)`` with label
smoothing ``eps``, as :func:`torch.nn.functional.cross_entropy` defines it. Logits exist for one chunk of rows at a
time. For a mean or sum their gradient is taken in the same pass (Liger, arXiv:2410.10989, section 3), so the head costs
three matrix products as in the plain run; for ``reduction="none"`` the chunk is computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_liger.head.chunks import row_chunks
from lightning_liger.head.early_gradients import handed_out, refuse_second_derivative
from lightning_liger.head.sums import WeightSum, sum_dtype
from lightning_liger.head.tail import TailOp, apply_tail, tail_with_slopes

Observer: TypeAlias = Callable[[Tensor, slice], None]

# entries between the beginnings of two rows of logits: 128 bytes of bf16
_ALIGNED = 64


def head_product(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows @ weight.T + bias`` computed in ``dtype``, whatever autocast would do."""
    with torch.autocast(rows.device.type, enabled=False):
        cast_bias = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(rows.to(dtype), weight.to(dtype), cast_bias)


def _chunk_loss(
    logits: Tensor, target: Tensor, smoothing: float, row_scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Loss of each row and, when ``row_scale`` is given, ``scale_i * d loss_i / d logits``."""
    # PyTorch's own log-softmax, whose rounding the plain run has too: over 49,152 entries it is off by 1e-5 on a CPU
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, target[:, None])[:, 0]
    loss = -picked if not smoothing else -(1 - smoothing) * picked - smoothing * logp.mean(-1)
    if row_scale is None:
        return loss, None
    gradient = logp.exp_()
    if smoothing:
        gradient -= smoothing / logits.shape[-1]
    gradient.scatter_add_(-1, target[:, None], torch.full_like(loss, smoothing - 1.0)[:, None])
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
        triton: bool,
        observe: Observer | None,
    ) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        # fp16 has no room for 1/n below its smallest numbers; everywhere else scaling first saves a rounding
        first, last = (1.0, scale) if dtype == torch.float16 else (scale, 1.0)
        want = first if any(wanted) and not per_row else None
        ctx.meta = (tail, smoothing, last, per_row, dtype, triton)
        losses, gradients = _chunks(rows, weight, bias, target, tail, smoothing, want, dtype, wanted, triton, observe)
        if per_row:
            ctx.save_for_backward(rows, weight, bias, target)
            return losses
        ctx.save_for_backward(*gradients)
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tail, smoothing, last, per_row, dtype, triton = ctx.meta
        if per_row and torch.is_grad_enabled():  # create_graph=True
            gradients = _differentiably(ctx.saved_tensors, ctx.needs_input_grad, tail, smoothing, dtype, grad)
            return (*gradients, *(None,) * 8)
        refuse_second_derivative()
        if per_row:
            rows, weight, bias, target = ctx.saved_tensors
            wanted = tuple(ctx.needs_input_grad[:3])
            row_scale = grad if grad.dtype == torch.float64 else grad.float()
            _, gradients = _chunks(
                rows, weight, bias, target, tail, smoothing, row_scale.contiguous(), dtype, wanted, triton
            )
        else:
            gradients = handed_out(ctx.saved_tensors, grad * last, triton=triton)
        return (*gradients, *(None,) * 8)


def _differentiably(
    saved: Sequence[Any],
    needs: Sequence[bool],
    tail: tuple[TailOp, ...],
    smoothing: float,
    dtype: torch.dtype,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves, all rows at once."""
    rows, weight, bias, target = saved
    z = apply_tail(head_product(rows, weight, bias, dtype).to(sum_dtype(dtype)), tail)
    losses = torch.nn.functional.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    wanted = [t for t, need in zip((rows, weight, bias), needs[:3], strict=True) if need]
    found = iter(torch.autograd.grad(losses, wanted, grad.to(losses.dtype), create_graph=True))
    return tuple(next(found) if need else None for need in needs[:3])


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
    triton: bool,
    observe: Observer | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Losses of all rows and, when ``scale`` is given, the gradients of rows, weight and bias that are wanted."""
    n, vocab = rows.shape[0], weight.shape[0]
    losses = torch.empty(n, dtype=torch.float32 if dtype != torch.float64 else dtype, device=rows.device)
    weight_c = weight.detach().to(dtype)
    bias_c = None if bias is None else bias.detach().to(dtype)
    want = scale is not None
    d_rows = torch.empty_like(rows) if want and wanted[0] else None
    sums = sum_dtype(dtype)
    d_bias = torch.zeros(vocab, dtype=sums, device=rows.device) if want and bias is not None and wanted[2] else None
    # one chunk needs no sums in fp32 beside the gradient that is given back
    narrow = triton and want and wanted[1] and weight.dtype == dtype
    spared = weight.numel() * (sums.itemsize - dtype.itemsize) if narrow else 0
    entry_bytes = dtype.itemsize if triton else 4
    # a number for each row is wanted where other things are large: log-probabilities under several models
    sparing = not isinstance(scale, float)
    parts = row_chunks(n, vocab, rows.device, entry_bytes, in_place=triton, sparing=sparing, spared=spared)
    d_weight = WeightSum(weight, dtype, single=len(parts) == 1) if want and wanted[1] else None
    logits = _LogitsBuffer(parts, vocab, dtype, rows.device) if triton else None
    chunk_loss = _triton_chunk if triton else _torch_chunk
    gradient: Tensor | None = None
    with torch.autocast(rows.device.type, enabled=False):
        for part in parts:
            h = rows[part].detach().to(dtype)
            z = torch.nn.functional.linear(h, weight_c, bias_c) if logits is None else logits.of(h, weight_c, bias_c)
            if observe is not None:
                observe(z, part)
            row_scale = scale[part] if isinstance(scale, Tensor) else scale
            losses[part], gradient = chunk_loss(z, target[part], tail, smoothing, row_scale)
            del z
            if gradient is None:
                continue
            if d_rows is not None:
                _product_into(d_rows[part], gradient, weight_c)
            if d_weight is not None:
                d_weight.add(gradient, h)
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=sums)
    # the weight's gradient is cast where the last chunk was, not beside it
    logits = gradient = None
    return losses, (
        d_rows,
        None if d_weight is None else d_weight.value(),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


class _LogitsBuffer:
    """Memory for one chunk of logits after the other, in rows that begin where fast matrix products want them to."""

    def __init__(self, parts: list[slice], vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        longest = max((p.stop - p.start for p in parts), default=0)
        self._rows = torch.empty(longest, -(-vocab // _ALIGNED) * _ALIGNED, dtype=dtype, device=device)
        self._vocab = vocab

    def of(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``h @ weight.T + bias``, valid until the next call."""
        z = self._rows[: h.shape[0], : self._vocab]
        if bias is None:
            return torch.mm(h, weight.T, out=z)
        return torch.addmm(bias, h, weight.T, out=z)


def _product_into(out: Tensor, gradient: Tensor, weight: Tensor) -> None:
    if out.dtype == gradient.dtype:
        torch.mm(gradient, weight, out=out)
    else:
        out.copy_(gradient @ weight)


def _torch_chunk(
    z: Tensor, target: Tensor, tail: tuple[TailOp, ...], smoothing: float, row_scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    lifted, slopes = tail_with_slopes(z.to(torch.float64 if z.dtype == torch.float64 else torch.float32), tail)
    loss, gradient = _chunk_loss(lifted, target, smoothing, row_scale)
    if gradient is None:
        return loss, None
    for slope in reversed(slopes):
        gradient = gradient * slope
    return loss, gradient.to(z.dtype)


def _triton_chunk(
    z: Tensor, target: Tensor, tail: tuple[TailOp, ...], smoothing: float, row_scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    from lightning_liger.head.triton_cross_entropy import cross_entropy_in_place

    form = scale_and_cap(tail)
    assert form is not None  # linear_cross_entropy() asked
    want = row_scale is not None
    loss = cross_entropy_in_place(
        z,
        target,
        inner=form[0],
        outer=form[1],
        smoothing=smoothing,
        row_scale=1.0 if row_scale is None else row_scale,
        want_gradient=want,
    )
    return loss, z if want else None


def scale_and_cap(tail: tuple[TailOp, ...]) -> tuple[float, float | None] | None:
    """``(inner, outer)`` of a tail ``inner * z`` (outer None) or ``outer * tanh(inner * z)``; None for any other."""
    inner, outer = 1.0, None
    for op in tail:
        if op.kind == "tanh":
            if outer is not None:
                return None
            outer = 1.0
        elif op.kind != "scale":
            return None
        elif outer is None:
            inner *= op.factor
        else:
            outer *= op.factor
    return inner, outer


def linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    tail: tuple[TailOp, ...] = (),
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    total: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "torch",
    observe: Observer | None = None,
) -> Tensor:
    """Cross entropy of a linear head, chunk by chunk.

    Args:
        rows: ``(N, H)`` hidden rows, every one of which counts (ignored ones are left out by the caller).
        weight: ``(V, H)``; ``bias``: ``(V,)`` or None.
        target: ``(N,)`` int64 in ``[0, V)``; not checked here.
        tail: element-wise steps after the product.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean of no rows is NaN with zero gradients, as in PyTorch.
        total: rows that a mean is over; ``N`` by default. Others may have the rest of them.
        dtype: dtype of the products; that of ``rows`` by default. Losses and sums are fp32 at least.
        backend: ``"torch"``; ``"triton"``: one kernel for each chunk's softmax and gradient; ``"liger"``: Liger's own
            fused linear cross entropy. The last two fall back to ``"torch"`` for tails and dtypes they do not know.
        observe: called with each chunk's product ``(n, V)``, before the tail, and the rows that it is of. Liger shows
            nobody its chunks.

    Returns:
        A scalar, or ``(N,)`` for ``"none"``, in fp32 (fp64 for fp64 rows).
    """
    dtype = dtype or rows.dtype
    loss: Tensor
    if backend == "liger":
        from lightning_liger.head.liger_backend import liger_linear_cross_entropy, supports

        if supports(tail, reduction, dtype):
            how = "sum" if total is not None else reduction
            loss = liger_linear_cross_entropy(rows, weight, bias, target, tail, label_smoothing, how, dtype)
            return loss if total is None or reduction != "mean" else loss / total
    n = rows.shape[0] if total is None else total
    scale = 1.0 / n if reduction == "mean" and n else 1.0
    triton = backend == "triton" and dtype != torch.float64 and scale_and_cap(tail) is not None
    loss = _LinearCrossEntropy.apply(
        rows, weight, bias, target, tail, label_smoothing, scale, reduction == "none", dtype, triton, observe
    )
    # added, so that the gradients of a mean of nothing are zero, as in PyTorch
    return loss + float("nan") if reduction == "mean" and not n else loss
