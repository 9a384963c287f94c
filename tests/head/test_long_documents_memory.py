"""One long document in bf16: nothing is made of the size of its logits or of its scores."""

from __future__ import annotations

from typing import Any

import torch
from helpers import causal_lm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_liger import Settings, accelerate

TOKENS, VOCAB = 6144, 8192


class Made(TorchDispatchMode):
    """The largest tensor that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return made


def test_nothing_grows_with_the_square_or_the_vocabulary() -> None:
    model = causal_lm("llama", vocab_size=VOCAB, max_position_embeddings=TOKENS, rms_norm_eps=1e-6).to(torch.bfloat16)
    handle = accelerate(model, Settings(tiled_mlp=512))
    ids = torch.randint(3, VOCAB, (1, TOKENS))
    with Made() as forward:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    with Made() as backward:
        loss.backward()
    assert handle.report.head.fused_calls == 1
    for made in (forward, backward):
        assert made.largest < TOKENS * VOCAB // 4, made.largest
        assert made.largest < TOKENS * TOKENS // 4, made.largest
