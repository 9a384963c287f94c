"""The kernel proof by the profiler: launches are found under the modules that made them."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.proof.report import ProofError
from lightning_liger.trees import callback_bases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS = 2
COMPARED: list[dict[str, Any]] = []


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
        self.model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def _collate(rows: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(rows), max(rows), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(rows):
        ids[row, :length] = torch.randint(1, 4096, (length,))
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Act(*callback_bases()):  # type: ignore[misc]
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.act(pl_module)


def _fit(callback: LigerCallback, act: Any = None) -> dict[str, Any]:
    lengths = [100, 513, 64, 1, 377, 200, 300, 17] * 2
    trainer = L.Trainer(
        callbacks=[*([Act(act)] if act else []), callback],
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(lengths, batch_size=4, collate_fn=_collate))  # type: ignore[arg-type]
    made: dict[str, Any] = callback.report.to_dict()["proof"]
    COMPARED.append(made["equivalence"])
    found: dict[str, Any] = made["kernels"]
    return found


def test_every_kernel_is_found_under_its_module() -> None:
    found = _fit(LigerCallback(kernels=True, compile=False, attention="varlen", verify="strict"))
    assert (found["step"], found["how"], found["missing"]) == (3, "profiled", [])
    assert found["ran"] == {
        "padding": [1, 1],
        "RoPE": [LAYERS] * 2,
        "attention": [LAYERS] * 2,
        "SwiGLU": [LAYERS] * 2,
        "RMSNorm": [2 * LAYERS + 1] * 2,
        "head+loss": [1, 1],
    }
    assert found["attention"] == ["varlen"]
    shares = found["device_time_shares"]
    assert {"fused kernels", "matmul", "attention", "other"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(1) and found["device_ms"] > 0


def test_plain_code_under_the_name_of_a_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper says that it ran, and launches something else: only the profiler can tell."""
    from lightning_liger.kernels import norms

    def plain(x: Any, weight: Any, eps: float, offset: float, casting_mode: str) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    with pytest.raises(ProofError, match=r"RMSNorm on model.model.norm: its kernel was not launched; what was: "):
        _fit(
            LigerCallback(kernels=True, compile=False, verify="strict", attention="varlen"),
            lambda module: monkeypatch.setattr(norms, "rms_norm", plain),
        )


def test_a_restored_forward_is_caught() -> None:
    def act(module: Any) -> None:
        del vars(module.model.model.layers[1].mlp)["forward"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _fit(LigerCallback(kernels=True, compile=False), act)
    assert found["ran"]["SwiGLU"] == [LAYERS - 1, LAYERS]
    assert any("SwiGLU on model.model.layers.1.mlp: its forward was replaced" in m for m in found["missing"])


def test_a_trace_is_kept(tmp_path: Any) -> None:
    _fit(LigerCallback(kernels=True, compile=False, profile=tmp_path))
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "model.model.layers.1.mlp" in text and "_rms_norm_forward_kernel" in text


@pytest.mark.parametrize("attention", ["varlen", "flex", "sdpa"])
def test_bf16_agrees_within_plain_bf16s_own_rounding(attention: str) -> None:
    _fit(LigerCallback(kernels=True, attention=attention, verify="strict"))
    found = COMPARED[-1]
    assert found["agreement"] is not None and not found["skipped"] and not found["part"], found
    assert found["agreement"]["worst_ratio"] < 0.7 and found["agreement"]["own_gradient"] < 0.1, found


def test_a_backend_that_forgets_documents_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_liger.padding.layout import Layout

    def act(module: Any) -> None:
        from lightning_liger.padding import attention

        choose = attention.choose

        def wrong(*args: Any, **kwargs: Any) -> Any:
            backend = choose(*args, **kwargs)
            if backend.run is None:
                return backend
            run = backend.run

            def whole(q: Any, k: Any, v: Any, layout: Any, *rest: Any) -> Any:
                documents = torch.ones(1, layout.tokens, dtype=torch.long)
                return run(q, k, v, Layout.from_documents(documents), *rest)

            return dataclasses.replace(backend, run=whole)

        monkeypatch.setattr(attention, "choose", wrong)

    with pytest.warns(UserWarning, match="attention over packed documents computes something else"):
        _fit(LigerCallback(kernels=False, attention="varlen"), act)
    assert COMPARED[-1]["switched_off"] == ["attention over packed documents"]


def test_memory_that_a_plain_run_would_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    _fit(LigerCallback(kernels=True, verify="strict"))
    assert COMPARED[-1]["part"].endswith("rows, hidden states only") and COMPARED[-1]["agreement"] is not None
