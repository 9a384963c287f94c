"""Does a decoder give the same result without padding? Asked of the decoder itself, on the first batch with padding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_liger.head.lazy import LazyRows, Source
from lightning_liger.padding.layout import Layout
from lightning_liger.padding.plain_decoder.dispatch import WATCHED
from lightning_liger.padding.plain_decoder.multihead import UnreadTensor
from lightning_liger.padding.plain_decoder.ragged import RaggedTensor
from lightning_liger.padding.plain_decoder.remembered import Remembered

if TYPE_CHECKING:
    from lightning_liger.padding.plain_decoder.decoder import PackedDecoder

# Relative to the norm of what is compared. The smallest leak between documents seen in any architecture is 4.5e-4;
# low precision cannot tell that from rounding, and only catches what is grossly different.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# FSDP's are kept from ragged tensors by hooks around them
_OWN_HOOKS = ("lightning_liger.", "torch.distributed.fsdp.")
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


class _WithoutDropout(TorchFunctionMode):
    """Dropout draws by shape, so that padded and packed runs could not be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False  # its dropout is called where this mode does not see it
        return func(*args, **kwargs)


def disagreement(decoder: PackedDecoder, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> str:
    """Where padded and packed results differ, or ``""``.

    Raises:
        Exception: whatever the decoder raises on tensors that hold real tokens alone.
    """
    if hooked := next((n for n, m in decoder.module.named_modules() if _is_hooked(m, decoder.module)), None):
        return f"forward hooks on its module {hooked!r} would see hidden states of real tokens alone"
    device = next((a.device for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)), torch.device("cpu"))
    with _undisturbed(decoder.module, device):
        watched = WATCHED.set(True)
        try:
            decoder.packed(args, kwargs, layout)
        finally:
            WATCHED.reset(watched)
        packed = decoder.packed(args, kwargs, layout)
        kept = next((n for n, m in decoder.module.named_modules() if _keeps(m)), None)
        padded = decoder.original(*args, **kwargs)
    if kept is not None:
        return f"its module {kept or 'forward'!r} keeps hidden states in an attribute"
    ours, theirs = tree_leaves(packed), tree_leaves(padded)
    if len(ours) != len(theirs):
        return "its output has other parts without padding"
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (found := _compare(a, b, layout)) is not None:
            return found
    return ""


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """As if nobody had asked: no gradient, no random number drawn, no state changed, no warning."""
    before = [(m, Remembered(vars(m))) for m in module.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(_WithoutDropout())
        try:
            yield
        finally:
            for inner, state in before:
                state.restore(vars(inner))


def _is_hooked(module: nn.Module, decoder: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return module is not decoder and any(not str(getattr(h, "__module__", "")).startswith(_OWN_HOOKS) for h in hooks)


def _keeps(module: nn.Module) -> bool:
    """Whether a tensor of real tokens is left behind in the module, where later code would find it."""
    values = [v for name, v in vars(module).items() if name not in ("_parameters", "_buffers", "_modules", "forward")]
    return any(
        isinstance(leaf, (RaggedTensor, LazyRows, UnreadTensor))
        for leaf in tree_leaves([v for v in values if _holds(v)])
    )


def _holds(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple, dict))


def _compare(ours: Tensor, theirs: Tensor, layout: Layout) -> str | None:
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"its output has shape {tuple(ours.shape)} without padding and {tuple(theirs.shape)} with it"
    if not ours.is_floating_point():
        return None
    a, b = _real(ours, layout), _real(theirs, layout)
    if a is None or b is None:
        return None
    tolerance = _TOLERANCE.get(a.dtype, 1e-4)
    if a.device.type == "cuda" and a.dtype == torch.float32:
        tolerance *= 20  # TF32 rounds by shape
    a, b = a.double(), b.double()
    difference = float((a - b).norm() / b.norm().clamp_min(1e-12))
    if difference <= tolerance or (difference != difference and bool(torch.equal(a.isnan(), b.isnan()))):
        return None
    return f"it gives another result without padding (difference {difference:.1e})"


def _real(value: Tensor, layout: Layout) -> Tensor | None:
    """The values, or hidden states of logits, at real tokens."""
    if isinstance(value, LazyRows):
        view = value.view_
        real = layout.on(view.source.device).index.reshape(-1) >= 0
        if not isinstance(view.source, Source) or view.source.root.numel() != real.numel():
            return None
        position = view.position.reshape(-1)
        return view.source.hidden_at(position[real[position]])
    index = layout.on(value.device).index
    if tuple(value.shape[:2]) == tuple(index.shape):
        return value[index >= 0]
    if value.shape[:1] == (index.numel(),):
        return value[index.reshape(-1) >= 0]
    return value
