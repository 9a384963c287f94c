"""No reader that stays fused makes a tensor of the size of the logits, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, LENGTH, WIDTH, VOCAB = 2, 64, 8, 101
LABELS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB


class Largest(TorchDispatchMode):
    """The largest tensor that any operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if type(t) is Tensor and t.untyped_storage().nbytes() // t.element_size() > self.numel:
                self.numel, self.by = t.untyped_storage().nbytes() // t.element_size(), str(func)
        return made


def dpo(x: Tensor) -> Tensor:
    picked = torch.gather(x.log_softmax(-1), 2, LABELS.unsqueeze(2)).squeeze(2)
    return -F.logsigmoid(0.1 * (picked * (LABELS > 3)).sum(-1)).mean()


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x[:, :-1].contiguous().view(-1, VOCAB), LABELS[:, 1:].reshape(-1)),
    "transposed": lambda x: F.cross_entropy(x.float().transpose(1, 2), LABELS, label_smoothing=0.1),
    "class weights": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.ones(VOCAB).double()),
    "every loss": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none").square().sum(),
    "log-softmax and nll": lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), LABELS.flatten()),
    "dpo": dpo,
    "index": lambda x: x.log_softmax(-1).flatten(0, 1)[torch.arange(LABELS.numel()), LABELS.flatten()].mean(),
    "z-loss": lambda x: dpo(x) + 1e-4 * x.logsumexp(-1).square().mean(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "distillation": lambda x: F.kl_div(x.log_softmax(-1), (x / 2).log_softmax(-1), log_target=True, reduction="sum"),
    "confidence": lambda x: x.softmax(-1).max(-1).values.mean() + x.topk(5).values.mean(),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", list(READERS))
def test_nothing_as_large_as_the_logits(name: str, padded: bool) -> None:
    c = case(batch=BATCH, length=LENGTH, width=WIDTH, vocab=VOCAB, padded=padded)
    x = c.lazy()
    with Largest() as largest:
        READERS[name](x).backward()
    assert 0 < largest.numel < BATCH * LENGTH * VOCAB / 4, largest.by
    assert c.report.materialised_by == {}


def test_the_measure_sees_ordinary_logits() -> None:
    with Largest() as largest:
        dpo(case(batch=BATCH, length=LENGTH, width=WIDTH, vocab=VOCAB).ordinary()).backward()
    assert largest.numel >= BATCH * LENGTH * VOCAB
