"""Direct preference optimisation as a LightningModule. It knows of no plugin."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from sft_module import Batch, pretrained_arguments


def answer_log_probs(model: Any, batch: Batch, prefix: str) -> Tensor:
    """``(B,)`` log-probability of each answer, summed over its tokens."""
    logits = model(
        input_ids=batch[f"{prefix}input_ids"], attention_mask=batch[f"{prefix}attention_mask"], use_cache=False
    ).logits
    labels = batch[f"{prefix}labels"][:, 1:]
    counted = labels != -100
    log_probs = F.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = log_probs.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
    return (chosen * counted).sum(-1)


class DPOModule(L.LightningModule):
    """The sigmoid loss of Rafailov et al., arXiv:2305.18290, equation 7, with a frozen reference.

    Args:
        model: checkpoint directory or name, of the policy and of its reference.
        beta: how strongly the policy is held to the reference.
        lr: learning rate of AdamW.
    """

    def __init__(self, model: str, beta: float = 0.1, lr: float = 1e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        load = AutoModelForCausalLM.from_pretrained
        self.policy = load(**pretrained_arguments(model), dtype=torch.float32).train()
        self.reference = load(**pretrained_arguments(model), dtype=torch.float32).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        chosen = answer_log_probs(self.policy, batch, "chosen_")
        rejected = answer_log_probs(self.policy, batch, "rejected_")
        with torch.no_grad():
            reference_chosen = answer_log_probs(self.reference, batch, "chosen_")
            reference_rejected = answer_log_probs(self.reference, batch, "rejected_")
        margin = self.hparams["beta"] * ((chosen - reference_chosen) - (rejected - reference_rejected))
        loss = -F.logsigmoid(margin).mean()
        self.log_dict({"loss": loss, "margin": margin.mean(), "accuracy": (margin > 0).float().mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams["lr"], weight_decay=0.0)
