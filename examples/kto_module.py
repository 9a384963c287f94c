"""Kahneman-Tversky optimisation as a LightningModule. It knows of no plugin."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dpo_module import answer_log_probs
from sft_module import Batch, pretrained_arguments


class KTOModule(L.LightningModule):
    """The loss of Ethayarajh et al., arXiv:2402.01306, equation 8: single answers, each wanted or not.

    Its baseline is the batch's estimate of the divergence from the reference, on prompts with answers to others.

    Args:
        model: checkpoint directory or name, of the policy and of its reference.
        beta: how soon an answer is good, or bad, enough.
        desirable_weight: of wanted answers.
        undesirable_weight: of the others.
        lr: learning rate of AdamW.
    """

    def __init__(
        self,
        model: str,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        lr: float = 1e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        load = AutoModelForCausalLM.from_pretrained
        self.policy = load(**pretrained_arguments(model), dtype=torch.float32).train()
        self.reference = load(**pretrained_arguments(model), dtype=torch.float32).requires_grad_(False)

    def _ratio(self, batch: Batch, prefix: str) -> Tensor:
        with torch.no_grad():
            reference = answer_log_probs(self.reference, batch, prefix)
        return answer_log_probs(self.policy, batch, prefix) - reference

    def _divergence(self, batch: Batch) -> Tensor:
        """One number for the whole job, as in the authors' code: not below zero, and nothing learns from it."""
        with torch.no_grad():
            mean = self._ratio(batch, "kl_").mean()
        return self.trainer.strategy.reduce(mean, reduce_op="mean").clamp_min(0.0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        beta, desirable = self.hparams["beta"], batch["desirable"]
        baseline = self._divergence(batch)
        ratio = self._ratio(batch, "")
        wanted = self.hparams["desirable_weight"] * (1 - torch.sigmoid(beta * (ratio - baseline)))
        unwanted = self.hparams["undesirable_weight"] * (1 - torch.sigmoid(beta * (baseline - ratio)))
        loss = torch.where(desirable, wanted, unwanted).mean()
        self.log_dict({"loss": loss, "kl": baseline}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams["lr"], weight_decay=0.0)
