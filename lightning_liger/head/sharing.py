"""Readers of the same logits share their products: log-probabilities and an entropy, a loss and its z-loss, metrics.

Backward: each reader hands what it was given to one node for all of them, whose own backward runs after theirs because
autograd waits for whoever was made from it. That node computes each chunk once, sums the gradients that all readers
have on it, and multiplies by the weight and the rows once.

Forward: which readers follow the first one is known only afterwards, but training repeats itself. What followed last
time is computed with the first reader's chunks this time, and forgotten again if nobody asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.likelihood import Alone, is_alone
from lightning_liger.head.observing import observed
from lightning_liger.head.per_row import Program, differentiably, grouped, per_row, values, with_gradients
from lightning_liger.head.plan import Plan, Products
from lightning_liger.head.readings import Deposit, Loss, NotedLoss, Reading, Readings, named, readings_of
from lightning_liger.head.shares import share_of
from lightning_liger.head.view import View
from lightning_liger.mirrored import ordinary

# -- reading ---------------------------------------------------------------------------------------------------------


def read(
    view: View,
    position: Tensor,
    program: Program,
    what: str,
    extras: tuple[Tensor, ...] = (),
    key: Hashable = None,
    alone: Alone | None = None,
) -> tuple[Tensor, ...]:
    """:func:`per_row`, sharing products with other readers of the same rows.

    Args:
        what: the reader's name.
        key: names ``program`` among all that ``what`` reads with, if it is the same function in every call and takes
            no extras; None if it is not.
        alone: the same by a kernel that shares nothing.
    """
    if (share := share_of(view, position)) is not None:
        return share.of_all(read(share.view, share.position, program, what, share.part(extras), key, alone))
    view.gather()
    with torch.autocast(view.source.device.type, enabled=False):
        if alone is not None and not _is_recomputed() and is_alone(view, ordinary(position)):
            return alone(view, ordinary(position), ordinary(extras))
        plan = Plan(view, ordinary(position))
        if not plan.is_one_product or _is_recomputed():
            return per_row(view, position, program, extras)
        inputs, plan.inputs = plan.inputs, []
        extras = ordinary(extras)
        expression = named(view)
        name = None if key is None or expression is None else (expression, what, key)
        reading = Reading(plan.evaluate, program, plan.copies)
        differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if name is not None and not differentiable:

            def compute(some: Tensor) -> tuple[Tensor, ...]:
                part = Plan(view, ordinary(position)[ordinary(some)])
                return values(_raw(part, [reading]), reading, (), grouped(part, part.inputs))

            if (along := observed(view, position, name, reading, compute)) is not None:
                return along
        readings = readings_of(view, position, None if expression is None else (expression, what))
        found = _found(readings, name, reading, plan, extras, inputs)
        if differentiable or (isinstance(readings.first, Loss) and not readings.first.differentiable):
            _count(readings)
        if not differentiable:
            return found
        if readings.token is None:
            readings.token = _Shared.apply(_raw(plan, []), readings.deposits, *inputs)
            view.watch_backward(readings.token)
        outputs: tuple[Tensor, ...] = _Reader.apply(
            plan, readings.deposits, reading, extras, found, readings.token, *inputs
        )
    view.watch_backward(*outputs)
    return outputs


def _is_recomputed() -> bool:
    """Whether checkpointing will run this again, and must find each reader as it was, whoever else reads."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _found(
    readings: Readings,
    name: Hashable,
    reading: Reading,
    plan: Plan,
    extras: tuple[Tensor, ...],
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The reader's outputs: guessed earlier, or computed now together with what will probably be asked for next."""
    opening, readings.opened = not readings.opened, True
    if name in readings.guessed:
        return readings.guessed.pop(name)
    others = {n: r for n, r in readings.followers().items() if n != name} if opening else {}
    if not opening or isinstance(readings.first, Loss):
        readings.remember(name, reading)
    together = [reading, *others.values()]
    counts: list[int] = []

    def program(products: Products, *given: Tensor) -> tuple[Tensor, ...]:
        made = [reading(products, *given), *(other(products) for other in others.values())]
        counts[:] = [len(m) for m in made]
        return tuple(t for m in made for t in m)

    with torch.no_grad():
        outputs = iter(values(_raw(plan, together), program, extras, grouped(plan, inputs)))
    groups = [tuple(next(outputs) for _ in range(counts[i])) for i in range(len(together))]
    readings.guessed.update(zip(others, groups[1:], strict=True))
    return groups[0]


def _count(readings: Readings) -> None:
    readings.count += 1
    if isinstance(readings.first, Loss) and readings.count > readings.loss_joined:
        readings.habits.joined.add(readings.first)


def _raw(plan: Plan, readings: Sequence[Reading]) -> Plan:
    """The same products, given as they are to a program of ``readings``."""
    made = copy.copy(plan)
    made.copies = sum(r.copies for r in readings)
    made.evaluate = lambda products: products  # type: ignore[assignment, return-value]
    return made


def joins_others(view: View) -> bool:
    """Whether a loss over labels should be read like others, because others will read the same rows.

    By itself it takes its gradients in one pass, which cannot be shared.
    """
    expression = named(view)
    if expression is None or not torch.is_grad_enabled():
        return False
    head, name = view.source.head, Loss(expression)
    joined = head.habits is not None and name in head.habits.joined
    head.readings.append(NotedLoss(name, view.position, view.source.row_of, joined))
    return joined


class _Shared(torch.autograd.Function):
    """The node behind all readers of the same rows; its output is an empty sign that they were made from it."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, deposits: list[Deposit], *inputs: Tensor | None) -> Tensor:
        ctx.plan, ctx.deposits = plan, deposits
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return torch.zeros((), device=plan.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        plan, needs = ctx.plan, ctx.needs_input_grad[2:]
        task = torch._C._current_graph_task_id()
        deposits = [d for d in ctx.deposits if d.task == task]
        ctx.deposits.clear()  # others are left over from a backward that failed
        if not deposits:
            return (None,) * (2 + len(needs))
        extras = tuple(e for d in deposits for e in d.extras)
        grads = tuple(g for d in deposits for g in d.grads)

        def program(products: Products, *given: Tensor) -> tuple[Tensor, ...]:
            rest = iter(given)
            made = [d.reading(products, *(next(rest) for _ in d.extras)) for d in deposits]
            return tuple(t for m in made for t in m)

        plan.copies = sum(d.reading.copies for d in deposits)
        tensors = grouped(plan, ctx.saved_tensors)
        _, gradients = with_gradients(plan, program, extras, tensors, needs, grads=grads)
        return (None, None, *gradients)


class _Reader(torch.autograd.Function):
    """One reader. Its backward leaves its gradients with the shared node, which comes after."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        deposits: list[Deposit],
        reading: Reading,
        extras: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        token: Tensor,
        *inputs: Tensor | None,
    ) -> Any:
        ctx.plan, ctx.deposits, ctx.reading = plan, deposits, reading
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *extras)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[6:]
        if all(g is None for g in grads):
            return (None,) * (6 + len(needs))
        saved = ctx.saved_tensors
        inputs, extras = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled():  # create_graph=True: by itself, differentiably
            program = ctx.reading.program
            return (None,) * 6 + differentiably(ctx.plan, program, extras, inputs, needs, grads)
        ctx.deposits.append(Deposit(torch._C._current_graph_task_id(), ctx.reading, extras, grads))
        sign = grads[0].new_zeros(()) if grads[0] is not None else torch.zeros((), device=ctx.plan.device)
        return (None,) * 5 + (sign.float(), *(None for _ in needs))
