"""Is a backend right on this device, for this layer? Tried out on a few hundred random tokens before it is used.

Output and gradients are compared with attention in double precision, one document at a time, and one document's values are changed to
see that no other document notices. A kernel built for another device, a beta release, an argument with another
meaning: whatever is wrong with it shows here, and not in a training run.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.registry import Backend, short
from lightning_liger.padding.layout import Layout

LENGTHS = (70, 1, 300, 33)  # a single token, and documents shorter and longer than any kernel's tiles
_WINDOW = 48
# Of the largest value. Flash kernels round the weights to the input's dtype.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}
_TENSOR_FLOAT = 5e-3  # fp32 where the user allows TensorFloat-32


def small(features: Features) -> Features:
    """What is proved: a window that the documents notice, no dropout, few heads in the same ratio."""
    groups = min(features.kv_heads, 2) if features.heads % features.kv_heads == 0 else features.kv_heads
    heads = groups * features.heads // features.kv_heads
    window = None if features.window is None else _WINDOW
    return replace(features, window=window, dropout=0.0, heads=heads, kv_heads=groups)


def prove(backend: Backend, features: Features, device: torch.device) -> str:
    """Why ``backend`` must not be used for layers like this one, or ``""``.

    It runs in a thread of its own: autocast, grad mode, inference mode, saved-tensor hooks of a checkpointed layer and
    everything else that is set around the caller belongs to the caller's thread.
    """
    answer: list[str] = []

    def ask() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            answer.append(_compare(backend, small(features), device))
        except Exception as error:  # kernels raise whatever they like; it is an answer
            text = " ".join(str(error).split())
            answer.append(f"it raised {type(error).__name__}: {text[:160]}")

    thread = threading.Thread(target=ask, name="lightning-liger attention proof")
    thread.start()
    thread.join()
    return answer[0]


def _inputs(features: Features, device: torch.device) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Query, key, value; sinks; and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(device, features.dtype)

    tokens, heads, groups = sum(LENGTHS), features.heads, features.kv_heads
    query = draw(1, heads, tokens, features.head_size, scale=2.0)  # so that it matters what is attended to
    key = draw(1, groups, tokens, features.head_size)
    value = draw(1, groups, tokens, features.value_size)
    sinks = draw(heads) if features.sinks else None
    return [query, key, value], sinks, draw(tokens, heads, features.value_size)


def _compare(backend: Backend, features: Features, device: torch.device) -> str:
    assert backend.run is not None
    layout = Layout.from_documents(
        torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))[None]
    )
    tensors, sinks, grad = _inputs(features, device)

    def run(given: list[Tensor], function: Any) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (*given, *([] if sinks is None else [sinks]))]
        out = function(*leaves[:3], layout, features, leaves[3] if len(leaves) > 3 else None)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    names = (
        "output",
        "gradient of the queries",
        "gradient of the keys",
        "gradient of the values",
        "gradient of the sinks",
    )
    found = run(tensors, backend.run)
    if found[0].dtype != features.dtype or found[0].shape != grad.shape:
        return f"it returns {short(found[0].dtype)} of shape {tuple(found[0].shape)}"
    exact = run([t.double() for t in tensors], per_document_reference)
    worst = [(_difference(f, e), n) for f, e, n in zip(found, exact, names, strict=False)]
    difference, name = max(worst)
    rough = features.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if not difference <= (_TENSOR_FLOAT if rough else _TOLERANCE[features.dtype]):
        return f"its {name} is wrong (off by {difference:.1e} of the largest value)"
    return _leak(backend, features, layout, tensors, sinks, found[0], grad)


def _leak(
    backend: Backend,
    features: Features,
    layout: Layout,
    tensors: list[Tensor],
    sinks: Tensor | None,
    before: Tensor,
    grad: Tensor,
) -> str:
    """Change the third document: the others' outputs stay, bit for bit, and send no gradient into it."""
    assert backend.run is not None
    part = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3]))
    changed = [t.detach().clone() for t in tensors]
    for t in changed:
        t[:, :, part] = -t[:, :, part].roll(1, dims=2)
    leaves = [t.requires_grad_() for t in changed]
    after = backend.run(leaves[0], leaves[1], leaves[2], layout, features, sinks)
    others = torch.ones(len(after), dtype=torch.bool)
    others[part] = False
    others = others.to(after.device)
    if not torch.equal(after.detach()[others], before[others]):
        return "changing one document changes another one's output"
    if torch.equal(after.detach()[part], before[part]):
        return "its output does not depend on its input"
    outside = grad.clone()
    outside[part] = 0
    if any(bool(g[:, :, part].any()) for g in torch.autograd.grad(after, leaves, outside.to(after.dtype))):
        return "one document's output sends gradients into another one"
    return ""


def _difference(found: Tensor, exact: Tensor) -> float:
    value = float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-6))
    return value if value == value else float("inf")


def per_document_reference(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None
) -> Tensor:
    """Attention written out, one document at a time; shapes as :class:`Backend` has them. Quadratic memory."""
    groups = features.heads // features.kv_heads
    scale = features.head_size**-0.5 if features.scale is None else features.scale
    parts = []
    for query, key, value in zip(*(t[0].split(list(layout.lengths), dim=1) for t in (q, k, v)), strict=True):
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        scores = query @ key.transpose(1, 2) * scale
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        token = torch.arange(query.shape[1], device=q.device)
        distance = token[:, None] - token[None, :]
        allowed = distance >= 0 if features.causal else torch.ones_like(distance, dtype=torch.bool)
        if features.window is not None:
            allowed = allowed & (distance.abs() < features.window)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., : query.shape[1]]
        parts.append((weights @ value).transpose(0, 1))
    return torch.cat(parts)
