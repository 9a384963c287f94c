"""torchtitan's Qwen3 model, which is Qwen2's once its query and key norms are off, in the loop of its trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.here import needs_cuda, not_installed
from lightning_liger.bench.peers.session import Session, labels
from lightning_liger.bench.task import Sample
from lightning_liger.bench.variants import Variant

NAME = "torchtitan"
_COMPILED = "blocks and loss compiled as torchtitan does it on CUDA devices"
_MEANING = "torchtitan's Qwen3 (query and key norms off, biases added) in its trainer's loop, padded batches, sdpa"


def variants(plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table."""
    missing = not_installed("torchtitan", "torchdata", "tyro") or _other_version()
    return [
        Variant("torchtitan", f"{_MEANING}; {_COMPILED}", None, peer=NAME, skipped=missing),
        Variant(
            "torchtitan flat",
            "the same with documents in one row and its varlen attention",
            None,
            peer=NAME,
            arguments={"flat": True},
            skipped=missing or needs_cuda(plain, "its varlen attention"),
        ),
    ]


def _other_version() -> str:
    found = version("torchtitan")
    return (
        ""
        if found.startswith("0.2.")
        else f"torchtitan {found} is installed, this is for 0.2 (pip install 'torchtitan<0.3')"
    )


def run(session: Session, *, flat: bool = False) -> None:
    """
    Args:
        flat: documents in one row.
    """
    from torchtitan.components.loss import cross_entropy_loss

    model = _model(session, "varlen" if flat else "sdpa")
    loss_of: Callable[..., Tensor] = cross_entropy_loss
    if session.device.type == "cuda":
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
        loss_of = torch.compile(cross_entropy_loss)
    optimizer = session.optimizer(model)
    amp = torch.autocast(session.device.type, torch.bfloat16) if session.autocast else nullcontext()
    batches = session.batches()
    session.start()
    for samples in batches:
        if session.turns.stopped:
            return
        session.saw(samples)
        optimizer.zero_grad()
        tokens, targets, given = (_flattened if flat else _padded)(samples)
        valid = (targets != -100).sum()
        tokens, targets, valid = (t.to(session.device) for t in (tokens, targets, valid))
        with amp:
            logits = model(tokens, **_on(session.device, given))
            loss = loss_of(logits, targets) / valid
            del logits
            loss.backward()
        session.turns.lost(loss)
        optimizer.step()
        session.turns.step()


def _model(session: Session, attention: str) -> Any:
    """With the plain run's weights."""
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    shape = session.task.shape
    plain = session.model()
    args = Qwen3ModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        vocab_size=shape["vocab_size"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        hidden_dim=shape["intermediate_size"],
        norm_eps=plain.config.rms_norm_eps,
        rope_theta=plain.config.rope_parameters["rope_theta"],
        qk_norm=False,
        attn_type=attention,
        attn_mask_type="block_causal" if attention == "varlen" else "causal",
        enable_weight_tying=shape["tie_word_embeddings"],
    )
    with session.device:
        model = Qwen3Model(args).to(session.dtype)
        model.rope_cache = model._precompute_rope_cache()
    state = plain.state_dict()
    biases = {name: state.pop(name) for name in list(state) if name.endswith("_proj.bias")}
    model.load_state_dict(Qwen3StateDictAdapter(args, None).from_hf(state))
    for number, block in model.layers.named_children():
        for part in "qkv":
            bias = biases[f"model.layers.{number}.self_attn.{part}_proj.bias"]
            getattr(block.attention, f"w{part}").bias = nn.Parameter(bias.clone())
    return model


def _padded(samples: list[Sample]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens and the next ones, as torchtitan's loader hands them over: short rows end in ignored ones."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([ids[:-1] for ids, _ in samples], batch_first=True)
    targets = pad([labels(s)[1:] for s in samples], batch_first=True, padding_value=-100)
    return tokens, targets, {}


def _flattened(samples: list[Sample]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """One row, positions that begin anew with each document, and where documents begin."""
    from torchtitan.models.attention import VarlenMetadata

    lengths = torch.tensor([len(ids) - 1 for ids, _ in samples])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    given = {
        "positions": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
        "attention_masks": VarlenMetadata(starts, starts, longest, longest),
    }
    tokens = torch.cat([ids[:-1] for ids, _ in samples])[None]
    return tokens, torch.cat([labels(s)[1:] for s in samples])[None], given


def _on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    made = {k: v.to(device) for k, v in given.items() if isinstance(v, Tensor)}
    masks = given.get("attention_masks")
    if masks is not None:
        made["attention_masks"] = masks._replace(cu_seq_q=masks.cu_seq_q.to(device), cu_seq_k=masks.cu_seq_k.to(device))
    return made
