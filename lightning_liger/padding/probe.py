"""Does this architecture give the same result without padding? Asked of a tiny model of the same kind, not of a list.

A small, randomly initialised instance of the backbone's own class is run padded and packed, in double precision, with
padding on the right and on the left. Whatever would make a difference (state that runs on from document to document,
position biases, masks of the model's own, keyword arguments that get lost on the way to attention) shows as one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.padding.attention import PackedAttention
from lightning_liger.padding.backbones import attention_layers
from lightning_liger.padding.boundary import POSITIONS, PackedBackbone
from lightning_liger.padding.layout import LayoutBook
from lightning_liger.padding.tiny import tiny_config
from lightning_liger.patching import Switch
from lightning_liger.report import PaddingReport

# In double precision a clean model differs by rounding of its fp32 parts; the smallest real leak seen among the
# architectures of transformers is 4.5e-4.
_TOLERANCE = 2e-5
_LENGTHS = (5, 19, 13)


@dataclass(frozen=True)
class Verdict:
    """``positions``: the position ids to use (see ``boundary.POSITIONS``), or None when the padding must stay."""

    positions: str | None
    reason: str = ""


_VERDICTS: dict[str, Verdict] = {}


def packing_verdict(backbone: Any) -> Verdict:
    """The verdict on ``backbone``'s class and configuration; cached for the process."""
    config = backbone.config
    try:
        key = f"{type(backbone).__module__}.{type(backbone).__qualname__} {json.dumps(config.to_dict(), default=str)}"
    except (TypeError, AttributeError, ValueError):
        key = f"{type(backbone)} {id(config)}"
    if key not in _VERDICTS:
        # Tests and users may rely on the random stream; building a model must not move it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _VERDICTS[key] = _ask(backbone)
    return _VERDICTS[key]


def _ask(backbone: Any) -> Verdict:
    name = type(backbone).__name__
    try:
        tiny = _build(backbone)
    except Exception as error:  # any architecture, remote code included: what cannot be asked is left padded
        return Verdict(None, f"no small {name} could be built to try it on ({type(error).__name__}: {error})")
    best = float("inf")
    problem = ""
    for positions in POSITIONS:
        if positions == "restart_after_pad" and not isinstance(getattr(tiny.config, "pad_token_id", None), int):
            continue
        try:
            difference = max(_difference(tiny, positions, left) for left in (False, True))
        except Exception as error:  # an exception of the model's own code is an answer: it cannot be packed
            problem = problem or f"{type(error).__name__}: {error}"
            continue
        if difference <= _TOLERANCE:
            return Verdict(positions)
        best = min(best, difference)
    if best < float("inf"):
        return Verdict(None, f"{name} gives another result without padding (difference {best:.1e})")
    return Verdict(None, f"{name} cannot run without padding ({problem})")


def _build(backbone: Any) -> Any:
    config = tiny_config(backbone.config)
    config._attn_implementation = backbone.config._attn_implementation or "eager"
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = "sdpa" if getattr(type(backbone), "_supports_sdpa", False) else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    config._experts_implementation = "eager"  # grouped kernels have no double precision
    cls = _original_class(type(backbone))
    try:
        with torch.device("cpu"):
            tiny = cls(config)
    finally:
        torch.set_default_dtype(before)
    tiny = tiny.double().eval()
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)  # at initialisation attention is near uniform and hides what it attends to
    return tiny


def _original_class(cls: type) -> type:
    """The class that ``fully_shard`` derived its own from."""
    from torch.distributed.fsdp import FSDPModule

    while issubclass(cls, FSDPModule):
        cls = next(base for base in cls.__mro__[1:] if not issubclass(base, FSDPModule))
    return cls


def _batch(vocab: int, pad: int, left: bool) -> tuple[Tensor, Tensor]:
    longest = max(_LENGTHS)
    ids = torch.full((len(_LENGTHS), longest), pad)
    mask = torch.zeros_like(ids)
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(_LENGTHS):
        part = slice(longest - length, longest) if left else slice(0, length)
        tokens = torch.randint(0, vocab - 1, (length,), generator=generator)
        ids[row, part] = tokens + (tokens >= pad)  # any token but the pad
        mask[row, part] = 1
    return ids, mask


def _difference(tiny: Any, positions: str, left: bool) -> float:
    """Largest difference at real tokens between the padded and the packed run, relative to the largest value."""
    vocab = tiny.get_input_embeddings().num_embeddings
    pad = getattr(tiny.config, "pad_token_id", None)
    ids, mask = _batch(vocab, pad if isinstance(pad, int) and 0 <= pad < vocab else 0, left)
    with torch.no_grad():
        plain = _tensors(tiny(input_ids=ids, attention_mask=mask))
        report = PaddingReport("probe")
        switch = Switch(True)
        bound = [PackedAttention(layer, switch) for layer in attention_layers(tiny)]
        backbone = PackedBackbone(tiny, switch, LayoutBook(), report, "auto", positions)
        for binding in (*bound, backbone):
            binding.bind()
        try:
            packed = _tensors(tiny(input_ids=ids, attention_mask=mask))
        finally:
            for binding in (backbone, *bound):
                binding.unbind()
    if not report.packed_calls:
        raise RuntimeError(report.off[0] if report.off else "the call was not packed")
    if plain.keys() != packed.keys():
        raise RuntimeError(f"the output has other parts: {sorted(plain.keys() ^ packed.keys())}")
    worst = 0.0
    for name, value in plain.items():
        other = packed[name]
        if value.shape != other.shape or value.shape[:2] != mask.shape:
            raise RuntimeError(f"output {name!r} is not one value per token")
        real = mask.bool()
        error = (value[real].double() - other[real].double()).abs().max()
        worst = max(worst, float(error / value[real].abs().max().clamp_min(1e-12)))
    return worst if worst == worst else float("inf")


def _tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of a model output by name, without its KV cache."""
    items = output.items() if hasattr(output, "items") else enumerate(output)
    # Not read like a user would: a reader of padded positions is given the padded run, which would be compared to itself.
    return {
        str(k): v.view_.dense() if isinstance(v, LazyRows) else v.clone() for k, v in items if isinstance(v, Tensor)
    }
