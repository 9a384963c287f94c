"""litgpt's GPT in the loop of ``litgpt finetune_full``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.here import not_installed
from lightning_liger.bench.peers.session import Session, labels
from lightning_liger.bench.task import Sample
from lightning_liger.bench.variants import Variant

NAME = "litgpt"
_MEANING = (
    "litgpt's GPT and chunked_cross_entropy in a Fabric loop as litgpt finetune_full has it: padded batches without a "
    "mask (pads are on the right, and ignored by the loss)"
)


def variants(plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table."""
    missing = not_installed("litgpt")
    return [
        Variant("litgpt", _MEANING, None, peer=NAME, skipped=missing),
        Variant(
            "litgpt compiled",
            "the same with torch.compile(model), as litgpt's pretraining does",
            None,
            peer=NAME,
            arguments={"compiled": True},
            skipped=missing
            or ("" if plain is None or plain.kind == "cuda" else "compiling is measured on CUDA devices"),
        ),
    ]


def run(session: Session, *, compiled: bool = False) -> None:
    """
    Args:
        compiled: the whole model with ``torch.compile``.
    """
    import lightning as L
    from litgpt.model import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_qwen_2_5
    from litgpt.utils import chunked_cross_entropy

    precision: Any = session.precision
    fabric: Any = L.Fabric(devices=1, accelerator=session.device.type, precision=precision)
    shape = session.task.shape
    plain = session.model()
    config = Config(
        name="qwen2",
        block_size=4096,
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_embd=shape["hidden_size"],
        n_query_groups=shape["num_key_value_heads"],
        intermediate_size=shape["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        attn_bias=True,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_eps=1e-6,
        rope_base=int(plain.config.rope_parameters["rope_theta"]),
    )
    weights: dict[str, Tensor] = {}
    copy_weights_qwen_2_5(config, {}, weights, plain.state_dict())
    with fabric.init_module(empty_init=True):
        model: Any = GPT(config)
    model.load_state_dict(weights)
    del plain, weights
    if shape["tie_word_embeddings"]:
        model.lm_head.weight = model.transformer.wte.weight
    batches = session.batches()
    model.max_seq_length = max(len(ids) for batch in batches for ids, _ in batch)
    if compiled:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(session.optimizer(model))
    model.train()
    session.start()
    for samples in batches:
        if session.turns.stopped:
            return
        session.saw(samples)
        batch = fabric.to_device(_padded(samples))
        logits = model(batch["input_ids"])
        loss = chunked_cross_entropy(logits[..., :-1, :], batch["labels"][..., 1:])
        fabric.backward(loss)
        session.turns.lost(loss)
        del logits, loss
        optimizer.step()
        optimizer.zero_grad()
        session.turns.step()


def _padded(samples: list[Sample]) -> dict[str, Tensor]:
    """As litgpt's collate function does."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([ids for ids, _ in samples], batch_first=True),
        "labels": pad([labels(s) for s in samples], batch_first=True, padding_value=-100),
    }
