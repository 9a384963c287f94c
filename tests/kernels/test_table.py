"""What Liger knows is read without a trace, and the page says what is true of this version."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed"),
    pytest.mark.timeout(600),
]

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "rope", "relu_squared")
# among them those whose classes Liger changes even when it is given an instance
SOME = ("llama", "gemma3", "llama4", "internvl", "paligemma", "qwen2_vl", "nemotron", "mixtral", "deepseek_v4", "glm4")


def modelling_modules() -> dict[str, dict[str, object]]:
    """Globals of all modelling modules, and the members of their classes."""
    found: dict[str, dict[str, object]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and ".modeling_" in name:
            found[name] = dict(vars(module))
            for key, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{key}"] = dict(vars(value))
    for module in (F, torch.nn, sys.modules["transformers.activations"]):
        found[module.__name__] = dict(vars(module))
    return found


@pytest.mark.parametrize("model_type", SOME)
def test_ligers_functions_run_without_changing_anything(model_type: str) -> None:
    from lightning_liger.kernels import liger
    from lightning_liger.kernels.table import build

    model = build(model_type)
    # reading Liger's functions may import modelling modules; those are new, not changed
    liger.knowledge(model)
    before, attributes = modelling_modules(), [dict(vars(m)) for m in model.modules()]
    known = liger.knowledge(model)
    assert known is not None and not known.error
    assert known.ops or model_type == "nemotron"
    after = modelling_modules()
    for name, members in before.items():
        changed = {k for k, v in members.items() if k != "__warningregistry__" and after[name].get(k) is not v}
        assert not changed, (name, changed)
    for module, old in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == old.keys()
        assert all(vars(module)[k] is v for k, v in old.items()), type(module)


def test_reading_changes_nothing_the_first_time_either() -> None:
    """In a fresh process, where the modelling module is imported by building the model."""
    from lightning_liger.kernels import liger
    from lightning_liger.kernels.table import build

    model = build("exaone4")
    before = modelling_modules()
    liger.knowledge(model)
    after = modelling_modules()
    assert all(after[n].get(k) is v for n, m in before.items() for k, v in m.items() if k != "__warningregistry__")


def test_knowledge_of_llama() -> None:
    from lightning_liger.kernels import liger
    from lightning_liger.kernels.table import build

    model = build("llama")
    known = liger.knowledge(model)
    assert known is not None
    by_op = {op: sum(o == op for o in known.ops.values()) for op in OPS}
    layers = model.config.num_hidden_layers
    assert by_op == {
        "rms_norm": 2 * layers + 1,
        "swiglu": layers,
        "layer_norm": 0,
        "geglu": 0,
        "rope": 0,
        "relu_squared": 0,
    }
    assert known.rotary == {"modeling_llama.apply_rotary_pos_emb"}
    assert set(known.options) == {"rms_norm", "swiglu", "rope"}
    model.config.model_type = "something_else"
    assert liger.knowledge(model) is None


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    split = [[field.strip() for field in line.strip("|").split("|")] for line in lines]
    header = next(i for i, row in enumerate(split) if row[0] == "type")
    assert split[header] == ["type", *OPS]
    return {row[0]: row[1:] for row in split[header + 1 :]}


def test_the_page_has_every_type_and_no_holes() -> None:
    from lightning_liger.kernels import liger

    table = rows()
    assert list(table) == list(liger.model_types())
    assert len(table) >= 53
    field = re.compile(r"–|\d+ (liger|structural|refused)(, \d+ (structural|refused))*")
    for model_type, fields in table.items():
        assert all(field.fullmatch(f) for f in fields), (model_type, fields)


@pytest.mark.parametrize("model_type", SOME)
def test_the_page_is_up_to_date(model_type: str) -> None:
    from lightning_liger.kernels.table import cell, look_at

    report, _ = look_at(model_type)
    assert rows()[model_type] == [cell(report.ops.get(op)) for op in OPS]


def test_looking_leaves_no_formula_behind() -> None:
    from lightning_liger.kernels import device, functions, norms
    from lightning_liger.kernels.table import look_at

    look_at("llama")
    assert norms.rms_norm is functions.rms_norm
    assert device.interpreted() is False


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    from lightning_liger.kernels.table import main

    try:
        assert main(["granite"]) == 0
        assert "| granite | 65 liger | – | 32 liger | – | 32 liger | – |" in capsys.readouterr().out
        page = tmp_path / "page.md"
        page.write_text("# Title\n<!-- table: begin -->\nold\n<!-- table: end -->\nrest\n")
        assert main(["granite", "--write", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("# Title") and text.endswith("rest\n") and "| granite |" in text and "old" not in text
        page.write_text("no marks")
        assert main(["granite", "--write", str(page)]) == 1
    finally:
        logging.disable(logging.NOTSET)
