"""Every attention backend that is installed, on a real device: alone, in real architectures, and through a Trainer."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, Settings, accelerate
from lightning_liger.padding.backends import choice
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.proof import prove
from lightning_liger.padding.backends.registry import by_name

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KERNELS = ("fa4", "fa3", "fa2", "varlen", "flex")
LENGTHS = (200, 513, 64, 1, 377)
VOCAB = 4096


def _features(head_size: int, heads: int, groups: int, **changes: Any) -> Features:
    plain = Features("cuda", torch.bfloat16, head_size, head_size, heads, groups)
    return replace(plain, capability=torch.cuda.get_device_capability(), **changes)


CASES: dict[str, dict[str, Any]] = {
    "heads of 64, seven to one": {"head_size": 64, "heads": 14, "groups": 2},
    "heads of 64, each its own": {"head_size": 64, "heads": 4, "groups": 4, "scale": 0.3},
    "heads of 128, four to one": {"head_size": 128, "heads": 32, "groups": 8},
    "heads of 256": {"head_size": 256, "heads": 4, "groups": 2},
    "window": {"head_size": 128, "heads": 8, "groups": 2, "window": 100},
    "soft-cap": {"head_size": 64, "heads": 8, "groups": 2, "softcap": 5.0},
    "soft-cap in a window": {"head_size": 128, "heads": 8, "groups": 2, "softcap": 50.0, "window": 100},
    "both directions": {"head_size": 64, "heads": 4, "groups": 4, "causal": False},
    "both directions in a window": {"head_size": 64, "heads": 4, "groups": 4, "causal": False, "window": 100},
    "sinks in a window": {"head_size": 64, "heads": 8, "groups": 1, "sinks": True, "window": 100},
}
# FlashAttention 4 and FlexAttention compile for each case; these between them have everything.
COMPILED = ("fa4", "flex")
COMPILED_CASES = ("heads of 64, seven to one", "heads of 128, four to one", "soft-cap in a window")
COMPILED_CASES += ("both directions in a window", "sinks in a window")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_documents_are_equal_and_apart(name: str, case: str) -> None:
    """Output, gradients, and nothing of one document in another; what ``prove`` compares is what is asserted."""
    backend, features = by_name(name), _features(**CASES[case])
    if name in COMPILED and case not in COMPILED_CASES:
        pytest.skip("saves compiling")
    if reason := backend.unavailable() or backend.cannot(features):
        pytest.skip(reason)
    assert prove(backend, features, torch.device("cuda", 0)) == ""


@pytest.mark.parametrize("name", ["varlen", "fa4"])
def test_fp16(name: str) -> None:
    backend, features = by_name(name), _features(64, 8, 2, dtype=torch.float16)
    if reason := backend.unavailable() or backend.cannot(features):
        pytest.skip(reason)
    assert prove(backend, features, torch.device("cuda", 0)) == ""


# -- in models ---------------------------------------------------------------------------------------------------------


def _model(kind: str) -> Any:
    import transformers as hf

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    config = {
        "llama": lambda: hf.LlamaConfig(**{**shape, "num_attention_heads": 4}),  # heads of 128
        "qwen2": lambda: hf.Qwen2Config(**shape),
        "mistral": lambda: hf.MistralConfig(**shape, sliding_window=100),
        "gemma2": lambda: hf.Gemma2Config(**shape, head_dim=64, sliding_window=100),
    }[kind]()
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).train()


def _batch(seed: int) -> dict[str, Tensor]:
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    generator = torch.Generator().manual_seed(seed)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(1, VOCAB, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Module(L.LightningModule):
    """Knows nothing of us; notes its losses, and its gradients in the last step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = [p.grad.float().clone() for p in self.model.parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(model: Any, precision: Any, callbacks: list[Any], folder: Path) -> Module:
    module = Module(copy.deepcopy(model))
    trainer = L.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, DataLoader([_batch(0), _batch(1)], batch_size=None))
    return module


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    difference = torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)]).norm()
    return float(difference / torch.stack([y.norm() for y in b]).norm())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2"])
def test_a_fit_in_bf16_is_within_plain_bf16s_own_error(kind: str, tmp_path: Path) -> None:
    model = _model(kind)
    exact = _fit(model, "32-true", [], tmp_path)
    plain = _fit(model, "bf16-true", [], tmp_path)
    ran = []
    for name in (*KERNELS, "sdpa", "auto"):
        if name != "auto" and by_name(name).unavailable():
            continue
        callback = LigerCallback(attention=name, verbose=False, kernels=False)
        if name == "varlen" and kind == "gemma2":
            with pytest.raises(ValueError, match=r"attention='varlen'.*no soft-capped scores"):
                _fit(model, "bf16-true", [callback], tmp_path)
            continue
        found = _fit(model, "bf16-true", [callback], tmp_path)
        padding = callback.report.padding
        assert padding.packed_calls == 2 and padding.padded_runs == 0, (name, padding.off)
        assert name == "auto" or list(padding.attention) == [name], padding.attention
        for loss, expected, reference in zip(found.losses, plain.losses, exact.losses, strict=True):
            assert abs(loss - reference) <= 2 * abs(expected - reference) + 2e-3 * reference, name
        assert _distance(found.gradients, exact.gradients) <= 1.1 * _distance(plain.gradients, exact.gradients), name
        ran.append((name, *padding.attention, f"{_distance(found.gradients, exact.gradients):.4f}"))
    print(kind, f"plain {_distance(plain.gradients, exact.gradients):.4f}", ran)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("name", [*KERNELS, "sdpa"])
@torch.no_grad()
def test_models_keep_documents_apart(name: str, kind: str) -> None:
    if by_name(name).unavailable() or (name == "varlen" and kind == "gemma2"):
        pytest.skip(by_name(name).unavailable() or "no soft-cap")
    model = _model(kind).to("cuda", torch.bfloat16).eval()
    accelerate(model, Settings(attention=name))
    batch = {k: v.cuda() for k, v in _batch(0).items() if k != "labels"}
    real = batch["attention_mask"].bool()
    before = model(**batch, use_cache=False).logits + 0
    batch["input_ids"][1] = (batch["input_ids"][1] + 7) % VOCAB
    after = model(**batch, use_cache=False).logits + 0
    others = [0, 2, 3, 4]
    assert torch.equal(before[others][real[others]], after[others][real[others]])
    assert not torch.equal(before[1][real[1]], after[1][real[1]])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["varlen", "flex"])
def test_checkpointed_layers_are_recomputed_alike(name: str, reentrant: bool, tmp_path: Path) -> None:
    """The proof runs inside of the first checkpointed layer, whose saved tensors are counted."""
    for cache in (choice._PROVED, choice._CHOSEN):
        cache.clear()
    model = _model("qwen2")
    expected = _fit(model, "bf16-true", [LigerCallback(attention=name, verbose=False)], tmp_path)
    for cache in (choice._PROVED, choice._CHOSEN):
        cache.clear()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = _fit(model, "bf16-true", [LigerCallback(attention=name, verbose=False)], tmp_path)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    assert _distance(found.gradients, expected.gradients) < 1e-2


def test_mixed_precision_takes_a_kernel(tmp_path: Path) -> None:
    """Autocast leaves normalised queries and keys in fp32; attention is still computed in bf16."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64))
    callback = LigerCallback(verbose=False)
    found = _fit(model, "bf16-mixed", [callback], tmp_path)
    exact = _fit(model, "32-true", [], tmp_path)
    assert found.losses == pytest.approx(exact.losses, rel=5e-3)
    assert "sdpa" not in callback.report.padding.attention


def test_a_proof_takes_a_moment() -> None:
    """Kernels that do not compile: a fraction of a second."""
    import time

    features, device = _features(128, 16, 4), torch.device("cuda", 0)
    prove(by_name("varlen"), features, device)
    started = time.perf_counter()
    assert prove(by_name("varlen"), features, device) == ""
    assert time.perf_counter() - started < 1


def test_the_steady_state_does_not_wait_for_the_device() -> None:
    """Neither does the choice of a backend, nor the block mask of a new batch."""
    for name in ("varlen", "flex", "fa4"):
        if by_name(name).unavailable():
            continue
        model = _model("llama").to("cuda", torch.bfloat16)
        handle = accelerate(model, Settings(attention=name))

        def step(seed: int, handle: Any = handle, model: Any = model) -> None:
            batch = _batch(seed)
            moved = {k: v.pin_memory().cuda(non_blocking=True) for k, v in batch.items() if k != "labels"}
            handle.book.pair({k: batch[k] for k in moved}, moved)
            torch.cuda.set_sync_debug_mode("error")
            try:
                model.model(**moved, use_cache=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
            step(0)  # proofs read results
        step(1)
    assert choice._PROVED
