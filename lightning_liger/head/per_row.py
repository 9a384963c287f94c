"""Any function of one row of logits, chunk by chunk, forward and backward, without the ``(N, V)`` tensor.

For each position the function sees its row of values ``f(W h + b)`` (or an expression of several such rows) and gives
back a few numbers: a log-sum-exp, gathered log-probabilities, an entropy, the best ids. Backward computes the chunk
again and differentiates it with autograd, so a reader costs one product forward and three backward. A reader that is
known to be summed (``scale``) takes its gradients in the same pass instead (Liger, arXiv:2410.10989, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_liger.head.collecting import Collected
from lightning_liger.head.early_gradients import handed_out, refuse_second_derivative
from lightning_liger.head.plan import Leaf, Plan, Products
from lightning_liger.head.shares import share_of
from lightning_liger.head.sums import sum_dtype
from lightning_liger.head.view import View
from lightning_liger.mirrored import ordinary

Program: TypeAlias = Callable[..., tuple[Tensor, ...]]
Grouped: TypeAlias = list[Sequence[Tensor | None]]


class _PerRow(torch.autograd.Function):
    """``program`` on every chunk. With ``scale``, its first output summed times ``scale``, gradients taken at once."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, program: Program, extras: tuple[Tensor, ...], scale: float | None, *inputs: Tensor | None
    ) -> Any:
        ctx.plan, ctx.program, ctx.scale = plan, program, scale
        ctx.set_materialize_grads(False)
        tensors = grouped(plan, inputs)
        if scale is not None and any(ctx.needs_input_grad):
            total, gradients = with_gradients(plan, program, extras, tensors, ctx.needs_input_grad[4:], scale=scale)
            ctx.save_for_backward(*gradients)
            assert total is not None
            return (total,)
        outputs = values(plan, program, extras, tensors)
        if scale is not None:
            return (outputs[0].sum() * scale,)
        ctx.save_for_backward(*inputs, *extras)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan, program, needs = ctx.plan, ctx.program, ctx.needs_input_grad[4:]
        if all(g is None for g in grads):
            return (None,) * (4 + len(needs))
        if ctx.scale is not None:
            refuse_second_derivative()
            (grad,) = grads
            assert grad is not None
            return (None,) * 4 + handed_out(ctx.saved_tensors, grad)
        saved = ctx.saved_tensors  # once: checkpointing gives them out a single time
        inputs, extras = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled():  # create_graph=True: once more in full, differentiably
            return (None,) * 4 + differentiably(plan, program, extras, inputs, needs, grads)
        _, gradients = with_gradients(plan, program, extras, grouped(plan, inputs), needs, grads=grads)
        return (None,) * 4 + gradients


def values(plan: Plan, program: Program, extras: Sequence[Tensor], tensors: Grouped) -> tuple[Tensor, ...]:
    """``program`` on every chunk, without gradients."""
    outputs: list[Tensor] = []
    for part in plan.parts():
        made = program(plan.evaluate(plan.products(tensors, part)), *(e[part] for e in extras))
        if not outputs:
            outputs = [torch.empty((plan.n, *m.shape[1:]), dtype=m.dtype, device=m.device) for m in made]
        for whole, piece in zip(outputs, made, strict=True):
            whole[part] = piece
    return tuple(outputs)


def differentiably(
    plan: Plan,
    program: Program,
    extras: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves (``create_graph=True``), all rows at once."""
    made = program(plan.evaluate(plan.products(grouped(plan, inputs), slice(0, plan.n))), *extras)
    chosen = [(m, g) for m, g in zip(made, grads, strict=True) if g is not None]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    found = iter(
        torch.autograd.grad(
            [m for m, _ in chosen], wanted, [g for _, g in chosen], create_graph=True, allow_unused=True
        )
    )
    return tuple(next(found) if need else None for need in needs)


def grouped(plan: Plan, inputs: Sequence[Tensor | None]) -> Grouped:
    flat = iter(inputs)
    return [[next(flat) for _ in range(leaf.inputs)] for leaf in plan.leaves]


def with_gradients(
    plan: Plan,
    program: Program,
    extras: Sequence[Tensor],
    tensors: Grouped,
    needs: Sequence[bool],
    *,
    grads: Sequence[Tensor | None] = (),
    scale: float | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Gradients of every input, chunk by chunk; with ``scale`` also the sum itself."""
    wanted = grouped(plan, needs)  # type: ignore[arg-type]
    sums = [
        [_zeros(t, leaf) if need else None for t, need in zip(group, want, strict=True)]
        for leaf, group, want in zip(plan.leaves, tensors, wanted, strict=True)
    ]
    total: Tensor | None = None
    parts = plan.parts(backward=True)
    collected = [
        None if leaf.dtype is None else Collected(group, bucket, leaf.dtype, parts[0].stop)
        for leaf, group, bucket in zip(plan.leaves, tensors, sums, strict=True)
    ]
    for part in parts:
        products = plan.products(tensors, part)
        z = Products(
            p.detach().requires_grad_(any(w) and p.is_floating_point()) for p, w in zip(products, wanted, strict=True)
        )
        with torch.enable_grad():
            made = program(plan.evaluate(z), *(e[part] for e in extras))
        if scale is not None:
            piece = made[0].detach().sum()
            total = piece if total is None else total + piece
            ends, starts = [made[0]], [torch.full_like(made[0], scale)]
        else:
            ends = [m for m, g in zip(made, grads, strict=True) if g is not None]
            starts = [g[part].to(m.dtype) for m, g in zip(made, grads, strict=True) if g is not None]
        chosen = [(m, g) for m, g in zip(ends, starts, strict=True) if m.requires_grad]
        leaves = [x for x in z if x.requires_grad]
        if not chosen or not leaves:
            continue
        found = iter(torch.autograd.grad([m for m, _ in chosen], leaves, [g for _, g in chosen], allow_unused=True))
        for leaf, bucket, product, x in zip(plan.leaves, sums, collected, z, strict=True):
            dz = next(found) if x.requires_grad else None
            if dz is None:
                continue
            if product is not None:
                product.add(dz, part)
            elif bucket[0] is not None:
                assert leaf.index is not None
                bucket[0].index_add_(0, leaf.index[part], dz.to(bucket[0].dtype))
    for product in filter(None, collected):
        product.flush()
    collected.clear()
    gradients = tuple(
        None if s is None or t is None else s.to(t.dtype)
        for group, bucket in zip(tensors, sums, strict=True)
        for t, s in zip(group, bucket, strict=True)
    )
    return None if total is None or scale is None else total * scale, gradients


def _zeros(tensor: Tensor | None, leaf: Leaf) -> Tensor | None:
    if tensor is None:
        return None
    dtype = sum_dtype(tensor.dtype)
    if leaf.dtype is not None:
        dtype = torch.promote_types(dtype, sum_dtype(leaf.dtype))
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def per_row(
    view: View,
    position: Tensor,
    program: Program,
    extras: tuple[Tensor, ...] = (),
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``program`` at ``N`` positions of ``view``.

    Args:
        position: ``(N,)`` int64 into the view's source.
        program: called with ``(n, V)`` values in fp32 (fp64 for fp64 heads) and the extras' chunk; gives back a tuple
            of tensors whose first dim is ``n``. Only element-wise along rows: no row may look at another.
        extras: tensors of ``N`` rows, cut like the rows. Not differentiated.
        scale: sum the first output and multiply by this; its gradients then come from the same pass.

    Returns:
        The outputs for all ``N`` rows, or ``(sum,)`` with ``scale``.
    """
    if (share := share_of(view, position)) is not None:
        if scale is None:
            return share.of_all(per_row(share.view, share.position, program, share.part(extras)))
        (part,) = per_row(share.view, share.own_position, program, tuple(map(share.own_part, extras)), scale)
        return (share.sum(part),)
    position, extras = ordinary((position, extras))
    view.gather()
    with torch.autocast(view.source.device.type, enabled=False):
        plan = Plan(view, position)
        inputs, plan.inputs = plan.inputs, []
        outputs: tuple[Tensor, ...] = _PerRow.apply(plan, program, extras, scale, *inputs)
    view.watch_backward(*outputs)
    return outputs
