"""Does this architecture give the same result without padding? Asked of a tiny model of the same kind, not of a list.

A small, randomly initialised instance of the backbone's own class is run padded and packed, in double precision, with
padding on the right and on the left; packed with one document changed, which no other may notice; and each document
alone. Whatever would make a difference (state that runs on from document to document, position biases, masks of the
model's own, keyword arguments that get lost on the way to attention) shows as one.

It takes about a tenth of a second, so that verdicts are kept for the process and not on disk.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.padding.apart import apart
from lightning_liger.padding.attention import PackedAttention
from lightning_liger.padding.backbones import attention_layers
from lightning_liger.padding.backends.features import OTHER_VALUES
from lightning_liger.padding.boundary import PackedBackbone
from lightning_liger.padding.layout import LayoutBook, NotPackable
from lightning_liger.padding.tiny import tiny_config
from lightning_liger.padding.verdict import POSITIONS, Verdict
from lightning_liger.patching import Switch
from lightning_liger.report import PaddingReport

# In double precision a clean model differs by rounding of its fp32 parts; the smallest real leak seen among the
# architectures of transformers is 4.5e-4.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 1e-4}
# What one document may move another by: nothing, but for the order in which experts sum their tokens in fp32.
_LEAK = 1e-6
_LENGTHS = (5, 19, 13)

_VERDICTS: dict[str, Verdict] = {}


def packing_verdict(backbone: Any) -> Verdict:
    """The verdict on ``backbone``'s class and configuration; cached for the process."""
    config = backbone.config
    try:
        key = f"{type(backbone).__module__}.{type(backbone).__qualname__} {json.dumps(config.to_dict(), default=str)}"
        key += f" {config._attn_implementation}"
    except (TypeError, AttributeError, ValueError):
        key = f"{type(backbone)} {id(config)}"
    if key not in _VERDICTS:
        with apart():
            _VERDICTS[key] = _ask(backbone)
    return _VERDICTS[key]


def _ask(backbone: Any) -> Verdict:
    name = type(backbone).__name__
    try:
        tiny = small_model(backbone)
    except Exception as error:  # any architecture, remote code included: what cannot be asked is left padded
        return Verdict(None, f"no small {name} could be built to try it on ({_short(error)})")
    try:
        plain = _plain_both(tiny)
    except Exception as error:  # the same
        return Verdict(None, f"a small {name} does not run padded ({_short(error)})")
    best = float("inf")
    problem = ""
    wrong_on_the_right = False
    for positions in POSITIONS:
        if positions == "restart_after_pad" and not isinstance(getattr(tiny.config, "pad_token_id", None), int):
            continue
        if positions == "restart" and wrong_on_the_right:
            continue  # with padding on the right these are the columns
        try:
            difference = _difference(tiny, positions, False, plain[False])
            wrong_on_the_right = difference > _TOLERANCE[tiny.dtype]
            if not wrong_on_the_right:
                difference = max(difference, _difference(tiny, positions, True, plain[True]))
        except Exception as error:  # an exception of the model's own code is an answer: it cannot be packed
            problem = problem or _short(error)
            continue
        if difference <= _TOLERANCE[tiny.dtype]:
            asks: set[str] = set()
            leak, beside = _separate(tiny, positions, asks)
            if not leak <= _LEAK:
                return Verdict(None, f"{name} lets documents see each other (one moves another by {leak:.1e})")
            if not beside <= _TOLERANCE[tiny.dtype]:
                return Verdict(None, f"{name} gives a document another result beside others (difference {beside:.1e})")
            cache, problem = _cache(tiny)
            return Verdict(
                positions, "", _is_causal(tiny, plain[False]), cache, problem, frozenset(asks - {OTHER_VALUES})
            )
        best = min(best, difference)
    if best < float("inf"):
        return Verdict(None, f"{name} gives another result without padding (difference {best:.1e})")
    return Verdict(None, f"{name} cannot run without padding ({problem})")


def _plain_both(tiny: Any) -> dict[bool, dict[str, Tensor]]:
    """The padded runs, in double precision if the model has no part that insists on single.

    Raises:
        ValueError: real tokens come out as NaN in either.
    """
    for dtype in (torch.float64, torch.float32):
        tiny.to(dtype)
        try:
            plain = {left: _plain(tiny, left) for left in (False, True)}
        except RuntimeError:
            if dtype == torch.float32:
                raise
            continue
        if all(_finite(plain[left], _batch(tiny, left)[1].bool()) for left in plain):
            return plain
    raise ValueError("it gives NaN")


def _finite(values: dict[str, Tensor], real: Tensor) -> bool:
    """At real tokens; a row of padding that has nothing to attend to may be NaN."""
    return all(bool((v[real] if v.shape[:2] == real.shape else v).isfinite().all()) for v in values.values())


def _short(error: BaseException) -> str:
    kind = "" if isinstance(error, NotPackable) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:160]}"


def small_model(backbone: Any) -> Any:
    config = tiny_config(backbone.config)
    config._attn_implementation = backbone.config._attn_implementation or "eager"
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = "sdpa" if getattr(type(backbone), "_supports_sdpa", False) else "eager"
    config._experts_implementation = "eager"  # grouped kernels have no double precision
    tiny = _original_class(type(backbone))(config).double().eval()
    with torch.no_grad():
        if any(
            getattr(torch.nn.init, n).__module__ != "torch.nn.init" for n in ("normal_", "kaiming_uniform_", "ones_")
        ):
            _initialise(tiny)  # a loader has switched initialisation off
        for parameter in tiny.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)  # at initialisation attention is near uniform and hides what it attends to
    return tiny


def _initialise(tiny: Any) -> None:
    for name, parameter in tiny.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.02)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.uniform_(0.5, 1.5)


def _original_class(cls: type) -> type:
    """The class that ``fully_shard`` derived its own from."""
    from torch.distributed.fsdp import FSDPModule

    while issubclass(cls, FSDPModule):
        cls = next(base for base in cls.__mro__[1:] if not issubclass(base, FSDPModule))
    return cls


def _batch(tiny: Any, left: bool) -> tuple[Tensor, Tensor]:
    vocab = tiny.get_input_embeddings().num_embeddings
    pad = getattr(tiny.config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < vocab else 0
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


def _plain(tiny: Any, left: bool) -> dict[str, Tensor]:
    ids, mask = _batch(tiny, left)
    with torch.no_grad():
        return _tensors(tiny(input_ids=ids, attention_mask=mask))


def _difference(tiny: Any, positions: str, left: bool, plain: dict[str, Tensor]) -> float:
    """Largest difference at real tokens between the padded and the packed run, relative to the largest value."""
    ids, mask = _batch(tiny, left)
    with _packed(tiny, positions) as run:
        packed = run(ids, mask)
    if plain.keys() != packed.keys():
        raise RuntimeError(f"the output has other parts: {sorted(plain.keys() ^ packed.keys())}")
    return _worst(plain, packed, mask.bool())


@contextmanager
def _packed(tiny: Any, positions: str, asks: set[str] | None = None) -> Iterator[Callable[[Tensor, Tensor], Any]]:
    """A function that runs ``tiny`` without padding; ``asks`` is given what its attention layers asked for.

    The function raises NotPackable if the run kept its padding after all.
    """
    report = PaddingReport("probe")
    switch = Switch(True)
    backbone = PackedBackbone(tiny, switch, LayoutBook(), report, "auto", Verdict(positions))
    bound = [*(PackedAttention(layer, switch) for layer in attention_layers(tiny)), backbone]

    def run(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        before = report.packed_calls
        with torch.no_grad():
            found = _tensors(tiny(input_ids=ids, attention_mask=mask))
        if report.packed_calls == before:
            raise NotPackable(next(iter(backbone.off.values()), report.off[0] if report.off else "not packed"))
        return found

    for binding in bound:
        binding.bind()
    try:
        yield run
    finally:
        for binding in reversed(bound):
            binding.unbind()
    if asks is not None:
        asks.update(backbone.asks)


def _separate(tiny: Any, positions: str, asks: set[str]) -> tuple[float, float]:
    """How much other documents move when one is changed, and how far they are from padded runs of their own."""
    ids, mask = _batch(tiny, left=False)
    vocab = tiny.get_input_embeddings().num_embeddings
    changed = ids.clone()
    changed[1, : _LENGTHS[1]] = (ids[1, : _LENGTHS[1]] + 7) % vocab
    with _packed(tiny, positions, asks) as run:
        before, after = run(ids, mask), run(changed, mask)
    others = mask.bool()
    others[1] = False
    leak = _worst(_rows(before, others), _rows(after, others), others)
    beside = 0.0
    for row in range(len(_LENGTHS)):
        one = slice(row, row + 1)  # padded as before: positions may be scaled by the padded length
        with torch.no_grad():
            alone = _rows(_tensors(tiny(input_ids=ids[one], attention_mask=mask[one])), mask[one])
        own = {name: value[one] for name, value in _rows(before, mask).items()}
        beside = max(beside, _worst(own, alone, mask[one].bool()))
    return leak, beside


def _rows(values: dict[str, Tensor], real: Tensor) -> dict[str, Tensor]:
    """Those that have a value for every token."""
    return {name: value for name, value in values.items() if value.shape[:2] == real.shape}


def _worst(plain: dict[str, Tensor], other: dict[str, Tensor], real: Tensor) -> float:
    worst = 0.0
    for name, value in plain.items():
        found = other[name]
        if value.shape != found.shape:
            raise RuntimeError(f"output {name!r} has another shape")
        if value.shape[:2] == real.shape:
            value, found = value[real], found[real]
        error = float((value.double() - found.double()).abs().max() / value.abs().max().clamp_min(1e-12))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _is_causal(tiny: Any, plain: dict[str, Tensor]) -> bool:
    """Whether real tokens come out the same when the padding behind them is not masked."""
    ids, mask = _batch(tiny, left=False)
    try:
        with torch.no_grad():
            return _worst(plain, _tensors(tiny(input_ids=ids)), mask.bool()) <= _TOLERANCE[tiny.dtype]
    except Exception:  # a model that must have a mask; nothing is inferred without one
        return False


def _cache(tiny: Any) -> tuple[tuple[str, type] | None, str]:
    """Where in the output a KV cache is when one is asked for, and its class; and what went wrong in asking."""
    from transformers import Cache

    ids, mask = _batch(tiny, left=False)
    takes = inspect.signature(type(tiny).forward).parameters.values()
    if not any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in takes):
        return None, ""
    try:
        with torch.no_grad():
            output = tiny(input_ids=ids, attention_mask=mask, use_cache=True)
    except Exception as error:  # the model's own code; a call that asks for a cache is then left alone
        return None, _short(error)
    items = output.items() if hasattr(output, "items") else ()
    return next(((str(name), type(value)) for name, value in items if isinstance(value, Cache)), None), ""


def _tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of a model output by name, without its KV cache."""
    items = output.items() if hasattr(output, "items") else enumerate(output)
    # Not read like a user would: a reader of padded positions is given the padded run, which would be compared to itself.
    return {
        str(k): v.view_.dense() if isinstance(v, LazyRows) else v.clone() for k, v in items if isinstance(v, Tensor)
    }
