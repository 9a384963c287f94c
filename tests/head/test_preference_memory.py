"""Preference losses on a policy and a reference: what plain code gives, and no tensor of the size of the logits."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from lazy_cases import assert_same, case
from preference_losses import LOSSES, Loss, dpo, grpo, kl_to_the_reference
from test_memory import BATCH, LABELS, LENGTH, VOCAB, WIDTH, Largest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_liger.head import chunks
from lightning_liger.head.lazy import LazyRows


def labels() -> Tensor:
    found = LABELS.clone()
    found[:, : LENGTH // 3] = -100
    found[1, -9:] = -100
    return found


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_preference_losses(loss: Loss) -> None:
    policy, reference = (case(batch=BATCH, length=LENGTH, width=WIDTH, vocab=VOCAB, bias=False, seed=s) for s in (0, 2))
    assert_same([policy, reference], lambda p, r: loss(p, r, LABELS, labels()), 1e-5, fused=True)
    x, y = policy.lazy(), reference.lazy()
    with Largest() as largest:
        loss(x, y, LABELS, labels()).backward()
    assert 0 < largest.numel < BATCH * LENGTH * VOCAB / 3, (largest.numel, largest.by)


class Live(TorchDispatchMode):
    """The most bytes that tensors held at once, as CUDA's allocator would count them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if self._is_memory(t)}
        for tensor in tree_leaves(result):
            if self._is_memory(tensor) and self._key(tensor) not in given | self._known:
                storage, key = tensor.untyped_storage(), self._key(tensor)
                self._known.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    @staticmethod
    def _is_memory(value: Any) -> bool:
        return isinstance(value, Tensor) and not isinstance(value, LazyRows)

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self._known.discard(key)


@pytest.mark.parametrize("loss", [dpo, grpo, kl_to_the_reference], ids=lambda f: f.__name__)
def test_all_copies_fit_the_budget(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's chunks on a CPU, at a scale: a head of 7B on 8,192 positions has 4.6 GiB of logits in fp32."""
    batch, length, vocab, width = 4, 128, 1024, 8
    logits = batch * length * vocab * 4
    monkeypatch.setattr(chunks, "_kind", lambda device: "cuda")
    monkeypatch.setattr(chunks, "_COPIES_BYTES", int(logits * chunks._COPIES_BYTES / (4.64 * 2**30)))
    together = int(logits * chunks._TOGETHER_BYTES["cuda"] / (4.64 * 2**30))
    monkeypatch.setitem(chunks._TOGETHER_BYTES, "cuda", together)
    monkeypatch.setitem(chunks._TILE, "cuda", 4)
    policy, reference = (
        case(batch=batch, length=length, width=width, vocab=vocab, dtype=torch.float32, bias=False, seed=s)
        for s in (0, 2)
    )
    ids = torch.arange(batch * length).view(batch, length) % vocab
    x, y = policy.lazy(), reference.lazy()
    with Live() as live:
        loss(x, y.detach(), ids, ids.masked_fill(torch.arange(length) < 32, -100)).backward()
    hidden = 16 * batch * length * width * 4
    assert live.most - 2 * vocab * width * 4 - hidden < logits / 4
