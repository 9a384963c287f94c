"""What cannot work is one clear error before the first optimizer step, naming the option and the remedy."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, Document, Plain, assert_engaged, assert_same, causal_lm, collate, fit, loader

from lightning_liger import LigerCallback, accelerate


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"padingfree": True}, TypeError, r"'padingfree'.*Did you mean 'padding_free'.*Valid options:.*fused_head"),
        ({"xyz": 1}, TypeError, r"'xyz'\. Valid options: padding_free"),
        ({"padding_free": "yes"}, ValueError, r"padding_free='yes': expected True or False"),
        ({"fused_head": 1}, ValueError, r"fused_head=1: expected True or False"),
        (
            {"attention": "flash"},
            ValueError,
            r"attention='flash': expected one of 'auto', 'fa4', 'fa3', 'fa2', 'varlen', 'flex', 'sdpa'",
        ),
        ({"head_backend": None}, ValueError, r"head_backend=None: expected one of 'auto', 'torch', "),
        ({"head": ""}, ValueError, r"head='': expected the path of an nn.Linear"),
        ({"head": "lm_head", "fused_head": False}, ValueError, r"head=.*fused_head=False. Drop one"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LigerCallback(**options)


def test_positional_options() -> None:
    with pytest.raises(TypeError, match=r"keyword options only, for example LigerCallback\(padding_free=True\)"):
        LigerCallback(True)  # type: ignore[call-arg]


def _refused(module: Any, data: Any, error: type[Exception], text: str, **options: Any) -> None:
    steps: list[int] = []
    module.on_before_optimizer_step = lambda optimizer: steps.append(1)
    with pytest.raises(error, match=text):
        fit(module, data, LigerCallback(verbose=False, **options))
    assert not steps


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("model.lm_haed", r"head='model.lm_haed': the module has no such submodule"),
        ("model.model", r"head='model.model' is a Qwen2Model; it must be an nn.Linear"),
    ],
)
def test_head_that_is_not_there(path: str, text: str) -> None:
    _refused(Plain(causal_lm()), loader(), ValueError, text, head=path)


class Own(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("module", [Plain, Own])
@pytest.mark.parametrize("label", [VOCAB, VOCAB + 1000, -1])
def test_labels_outside_of_the_vocabulary(module: Any, label: int) -> None:
    def wrong(batch: list[Document]) -> Any:
        made = collate(batch)
        made["labels"][1, -1] = made["labels"][1, 2] = label
        return made

    # a label on padding makes the model run padded; the message is the same
    text = rf"label {label} is outside of the vocabulary: the LM head has {VOCAB} rows.*resize_token_embeddings"
    _refused(module(causal_lm()), loader(wrong), IndexError, text)


@pytest.mark.parametrize("cut", ["row", "column"])
def test_mask_of_another_shape(cut: str) -> None:
    def wrong(batch: list[Document]) -> Any:
        made = collate(batch)
        mask = made["attention_mask"]
        made["attention_mask"] = mask[:-1] if cut == "row" else mask[:, :-2]
        return made

    text = r"attention_mask has shape \(\d+, \d+\) but the tokens have shape \(4, \d+\).*collate"
    _refused(Plain(causal_lm()), loader(wrong), ValueError, text)


def _with_empty_row(batch: list[Document]) -> Any:
    made = collate(batch)
    made["attention_mask"][2] = 0
    made["labels"][2] = -100
    return made


def test_empty_document() -> None:
    text = r"every position of row 2.*empty document.*Drop such samples.*padding_free=False"
    _refused(Plain(causal_lm()), loader(_with_empty_row), ValueError, text)


def test_the_remedy_for_empty_documents_works() -> None:
    ours = fit(Plain(causal_lm()), loader(_with_empty_row), LigerCallback(padding_free=False, verbose=False))
    assert_same(fit(Plain(causal_lm()), loader(_with_empty_row)), ours)
    assert_engaged(ours, packed=False)


# -- nothing to accelerate -------------------------------------------------------------------------------------------


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _numbers() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(torch.randn(16, 4, generator=generator), batch_size=4)  # type: ignore[arg-type]


def _regression() -> Regression:
    torch.manual_seed(3)
    return Regression()


def test_a_module_without_a_transformer_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    plain = fit(_regression(), _numbers())
    ours = fit(_regression(), _numbers(), LigerCallback())
    assert ours.losses == plain.losses
    assert ours.report["nothing_to_accelerate"]
    out = capsys.readouterr().out
    assert out.strip() == (
        "lightning-liger: nothing to accelerate (no transformers model and no language-model head was found); "
        "everything runs as it is"
    )
    assert "liger/tokens_per_second" not in ours.report["metrics"]


def test_everything_switched_off_trains_plain(capsys: pytest.CaptureFixture[str]) -> None:
    ours = fit(Plain(causal_lm()), loader(), LigerCallback(padding_free=False, fused_head=False))
    assert_same(fit(Plain(causal_lm()), loader()), ours, loss=0, gradient=0, parameter=0)
    out = capsys.readouterr().out
    assert "nothing to accelerate (see below)" in out
    assert "Padding removal: switched off (padding_free=False)" in out
    assert "Fused LM head + loss: switched off (fused_head=False)" in out
    assert ours.report["metrics"]["liger/tokens_per_second"] > 0, "tokens are counted all the same"


def test_an_option_that_does_not_fit_leaves_the_module_alone() -> None:
    from lightning_liger import Settings

    model = causal_lm()
    before = [set(vars(m)) for m in model.modules()]
    with pytest.raises(ValueError, match="no such submodule"):
        accelerate(model, Settings(head="nowhere"))
    assert [set(vars(m)) for m in model.modules()] == before
