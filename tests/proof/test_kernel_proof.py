"""What ran in an early step is counted, and whatever did not run is named."""

from __future__ import annotations

import copy
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import Plain, causal_lm, collate, fit, loader
from sabotage import Sabotage, restore_forward
from torch import Tensor

from lightning_liger import LigerCallback
from lightning_liger.kernels.device import interpreted
from lightning_liger.proof.profiled import kind_of
from lightning_liger.proof.report import ProofError


def proof(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = run.report["proof"]["kernels"]
    return found


def test_calls_are_counted_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # a narrow terminal cuts the line in two
    run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verify="strict"))
    found = proof(run)
    assert (found["step"], found["how"], found["missing"], found["idle"]) == (1, "counted", [], [])
    assert found["ran"] == {"padding": [1, 1], "attention": [2, 2], "head+loss": [1, 1]}
    assert found["attention"] == ["sdpa"]
    assert "padding 1/1 · attention 2/2 sdpa · head+loss 1/1" in capsys.readouterr().out


def test_nothing_is_left_on_the_modules() -> None:
    module = Plain(causal_lm("llama"))
    fit(module, loader(), LigerCallback(verbose=False))
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_an_attention_layer_restored_behind_our_back_is_named() -> None:
    sabotage = Sabotage(restore_forward("model.model.layers.1.self_attn"))
    with pytest.warns(UserWarning, match="layers.1.self_attn: its forward was replaced after"):
        run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False), callbacks=[sabotage])
    found = proof(run)
    assert found["ran"]["attention"] == [1, 2]
    assert found["missing"] == [
        "attention on model.model.layers.1.self_attn: its forward was replaced after it was accelerated, by "
        "LlamaAttention's own"
    ]


@pytest.mark.parametrize("path", ["model.lm_head", "model.model"])
def test_strict_ends_the_training_before_it_goes_on(path: str) -> None:
    module = Plain(causal_lm("llama"))
    callback = LigerCallback(verbose=False, verify="strict")
    with pytest.raises(ProofError, match=f"on {path}: its forward was replaced.*\n.*verify='warn'"):
        fit(module, loader(), callback, callbacks=[Sabotage(restore_forward(path))])
    assert not any("forward" in vars(m) for m in module.modules()), "nothing of us is left after the error"


def test_a_replacement_by_somebody_else_is_named() -> None:
    def act(module: Any) -> None:
        module.model.lm_head.forward = lambda x: F.linear(x, module.model.lm_head.weight)

    with pytest.raises(ProofError, match=r"by .*act\.<locals>\.<lambda>"):
        fit(
            Plain(causal_lm("llama")),
            loader(),
            LigerCallback(verbose=False, verify="strict"),
            callbacks=[Sabotage(act)],
        )


def test_a_wrapper_around_ours_is_no_replacement() -> None:
    def act(module: Any) -> None:
        ours = module.model.lm_head.forward
        module.model.lm_head.forward = lambda *args: ours(*args)

    run = fit(
        Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="strict"), callbacks=[Sabotage(act)]
    )
    assert proof(run)["ran"]["head+loss"] == [1, 1]


class ReadsLogits(Plain):
    """A loss that needs all logits as they are."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.linalg.vector_norm(logits)


def test_logits_computed_in_full_are_named_with_their_place() -> None:
    run = fit(ReadsLogits(causal_lm("llama")), loader(), LigerCallback(verbose=False))
    (missing,) = proof(run)["missing"]
    assert missing.startswith("head+loss on model.lm_head: logits were computed in full for ")
    assert "test_kernel_proof.py" in missing


def test_a_batch_without_padding_is_no_failure() -> None:
    def equal(batch: Any) -> dict[str, Tensor]:
        made = collate(batch)
        ids = torch.full((4, 8), 5)
        return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    run = fit(Plain(causal_lm("llama")), loader(equal), LigerCallback(verbose=False, verify="strict"))
    assert proof(run)["ran"] in (
        {"padding": [1, 1], "attention": [2, 2], "head+loss": [1, 1]},
        {"padding": [0, 1], "head+loss": [1, 1]},
    )


class Gated(Plain):
    """Holds a second model that no step calls."""

    def __init__(self) -> None:
        super().__init__(causal_lm("llama"))
        self.spare = causal_lm("qwen2")


def test_what_is_not_called_is_idle() -> None:
    run = fit(Gated(), loader(), LigerCallback(verbose=False, verify="strict"))
    assert proof(run)["ran"]["padding"] == [1, 2]
    assert "padding on spare.model: not called in this step" in proof(run)["idle"]


def test_off_proves_nothing() -> None:
    run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="off"))
    assert proof(run)["step"] == 0
    assert proof(run)["ran"] == {}


def test_kernels_asked_for_by_name_that_cannot_run() -> None:
    if torch.cuda.is_available() or interpreted():
        pytest.skip("they can run here")
    callback = LigerCallback(verbose=False, verify="strict", kernels={"rms_norm": True})
    with pytest.raises(ProofError, match=r"rms_norm.*need a CUDA device"):
        fit(Plain(causal_lm("llama")), loader(), callback)


def test_a_trace_is_kept_with_the_names_of_modules(tmp_path: Path) -> None:
    run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, profile=tmp_path))
    assert (proof(run)["step"], proof(run)["how"]) == (3, "profiled")
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rank0") and ".pt.trace.json" in file.name
    data = file.read_bytes()
    text = gzip.decompress(data) if file.suffix == ".gz" else data
    names = {event.get("name") for event in json.loads(text)["traceEvents"]}
    assert {"model.model.layers.1.mlp.gate_proj", "model.lm_head", "model.model"} <= names


def test_somebody_elses_profiler_is_left_alone(tmp_path: Path) -> None:
    class Profiled(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.start()

        def on_train_end(self, *_: Any) -> None:
            self.profiler.stop()

    theirs = Profiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fit(
            Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, profile=tmp_path), callbacks=[theirs]
        )
    assert proof(run)["how"] == "counted" and "another profiler" in proof(run)["skipped"]
    assert theirs.profiler.events()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"verify": "yes"}, {"verify": True}, {"profile": 3}, {"profile": ""}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LigerCallback(**options)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_rms_norm_forward_kernel", "fused kernels"),
        ("_cross_entropy_kernel", "fused kernels"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matmul"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel, ("_rms_norm_forward_kernel",)) == kind


def test_copies_made_in_the_step_that_is_profiled(tmp_path: Path) -> None:
    class Copies(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.twin = [copy.deepcopy(self.model)]
            return super().training_step(batch, batch_idx)

    module = Copies(causal_lm("llama"))
    run = fit(module, loader(), LigerCallback(verbose=False, profile=tmp_path, verify="strict"), max_steps=3)
    assert proof(run)["how"] == "profiled"
    assert module.twin[0](**collate(loader().dataset[:4])).loss.isfinite()
