"""Which linear layers are language-model heads, and their ``forward`` that answers with lazy logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import HeadReport


class LazyHead(Rebound):
    """``forward`` of one ``nn.Linear`` whose outputs are vocabulary entries."""

    def __init__(self, module: nn.Module, switch: Switch, report: HeadReport, backend: str) -> None:
        super().__init__(module, switch)
        self.report = report
        self.backend = backend

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            return self.original(*args, **kwargs)
        hidden = args[0]
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling() or not _whole(weight) or hidden.device != weight.device:
            return self.original(*args, **kwargs)
        if not isinstance(hidden, LazyRows) and hidden.shape[:-1].numel() == 0:
            return self.original(*args, **kwargs)
        kind = hidden.device.type
        lowered = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind) if lowered else hidden.dtype
        if (dtype != weight.dtype and not lowered) or _transforming():
            return self.original(*args, **kwargs)  # a mismatch that PyTorch reports by itself
        backend = resolve_backend(self.backend, hidden.device)
        self.report.name(backend)
        return LazyRows.logits(hidden, Head(weight, bias, dtype, backend, self.report))


def resolve_backend(wanted: str, device: torch.device) -> str:
    """The ``head_backend`` to use for rows on ``device``.

    Raises:
        ValueError: a backend that cannot run there.
    """
    import importlib.util
    import os

    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if wanted == "auto":
        return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "torch"
    if wanted in ("triton", "liger"):
        package = "triton" if wanted == "triton" else "liger_kernel"
        if not runs_triton:
            raise ValueError(f"head_backend={wanted!r} needs a CUDA device; the head is on {device}. Use 'auto'.")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"head_backend={wanted!r} needs the package {package}. Install it or use 'auto'.")
    return wanted


def _transforming() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp) traces the call."""
    return bool(torch._C._functorch.maybe_current_level() is not None)


def _whole(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return not isinstance(weight, DTensor)


def find_heads(module: nn.Module, named: str | None) -> tuple[list[nn.Linear], list[str]]:
    """The heads to fuse, and why other candidates are not.

    Args:
        named: path given by the user; then only this one is taken.

    Raises:
        ValueError: ``named`` does not lead to an ``nn.Linear``.
    """
    if named is not None:
        try:
            chosen = module.get_submodule(named)
        except AttributeError as error:
            raise ValueError(f"head={named!r}: the module has no such submodule ({error}).") from None
        if not isinstance(chosen, nn.Linear):
            raise ValueError(f"head={named!r} is a {type(chosen).__name__}; it must be an nn.Linear.")
        return [chosen], []
    found: dict[nn.Module, None] = {}
    refused: list[str] = []
    inside: set[nn.Module] = set()
    for model in module.modules():
        if not any(k.__name__ == "PreTrainedModel" for k in type(model).__mro__):
            continue
        inside.update(m for m in model.modules() if m is not model)
        head = _output_embeddings(model)
        if head is None or head in found:
            continue
        reason = _refusal(head)
        if reason is None:
            found[head] = None
        elif reason not in refused:
            refused.append(reason)
    for head in _by_shape(module, inside):
        found.setdefault(head)
    return list(found), refused  # type: ignore[arg-type]


def _output_embeddings(model: Any) -> nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None


def _refusal(head: nn.Module) -> str | None:
    from torch.distributed.fsdp import FSDPModule

    if isinstance(head, FSDPModule):
        return "the head is sharded by itself, so its weight is gone when the loss reads it"
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__name__}, whose own computation must be kept"
    if head._forward_hooks or head._forward_pre_hooks:
        return "the head carries forward hooks of its own"
    return None


def _by_shape(module: nn.Module, known: set[nn.Module]) -> list[nn.Linear]:
    """Heads outside of transformers models: tied to an embedding, or the last projection onto an embedding's rows."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding) and m not in known]
    shapes = {(e.num_embeddings, e.embedding_dim) for e in embeddings}
    tables = {id(e.weight) for e in embeddings}
    linears = [m for m in module.modules() if type(m) is nn.Linear and m not in known]
    tied = [m for m in linears if id(m.weight) in tables]
    if tied:
        return tied
    largest = max((rows for rows, _ in shapes), default=0)
    untied = [m for m in linears if (m.out_features, m.in_features) in shapes and m.out_features == largest]
    return untied[-1:]
