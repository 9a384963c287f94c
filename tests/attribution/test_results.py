"""What follows from measured steps: medians, ratios, verdicts, and the table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lightning_liger.bench.advice import advice
from lightning_liger.bench.batches import contents, whole_numbers
from lightning_liger.bench.messages import Done, Failure, Plan, Turn
from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.showing import show
from lightning_liger.bench.smoothness import smoothness
from lightning_liger.bench.variants import AS_PADDED, FEATURES, PLAIN, Variant, one_by_one


def turn(seconds: Sequence[float], losses: Sequence[float], first: int = 0, tokens: int = 100) -> Turn:
    count = len(seconds)
    return Turn(
        seconds=tuple(seconds),
        tokens=(tokens,) * count,
        positions=(200,) * count,
        largest=200,
        losses=tuple(losses),
        checksums=tuple(range(first, first + count)),
        flops=(1e9,) * count,
        peak_memory=2_000_000_000,
        needs=0,
        free=0,
    )


def row(variant: Variant, seconds: float, losses: Sequence[float], precision: str = "32-true") -> Row:
    made = Row(variant, precision)
    made.add_warm_up(turn([9.0], losses[:1]))
    made.add_turn(turn([seconds] * 2, losses[1:3], 1))
    made.add_turn(turn([seconds, 2 * seconds], losses[3:5], 3))
    made.end(Done(int(1e9 * seconds)))
    return made


FAST = Variant("+head", "less", {})
LOSSES = [3.0, 2.5, 2.4, 2.2, 2.1]


def compared(fast: Row) -> Comparison:
    return Comparison(Plan(1, 2, 2), [row(PLAIN, 4.0, LOSSES), fast], name="demo", device="cpu", order="side by side")


def test_numbers() -> None:
    fast = row(FAST, 1.0, LOSSES)
    result = compared(fast)
    assert fast.step_seconds == 1.0 and fast.tokens_per_second == pytest.approx(100.0)
    assert fast.tokens_per_step == 100
    assert result.speedup(fast) == pytest.approx(4.0) and result.speedup_of_turns(fast) == pytest.approx((4.0, 4.0))
    assert fast.spread == pytest.approx(0.125)  # quartiles 1 and 1.25
    assert fast.padding == 0.5 and result.deviation(fast) == 0 and result.problems() == []
    assert result.memory_ratio(fast) == pytest.approx(2.0 / 4.0)
    assert result.mfu(fast) is None
    fast.peak_flops = 8e9
    assert result.mfu(fast) == pytest.approx(1e9 / 8e9)
    assert json.loads(json.dumps(result.to_dict()))["variants"][1]["speedup"] == pytest.approx(4.0)


def test_verdicts() -> None:
    def problems(losses: Sequence[float], precision: str = "32-true", variant: Variant = FAST) -> list[str]:
        return compared(row(variant, 1.0, losses, precision)).problems()

    off = [*LOSSES[:4], 2.1 * 1.001]
    assert "differ from plain's by 1.0e-03, more than 1e-05" in problems(off)[0]
    assert problems(off, "bf16-mixed") == []
    assert "differ from plain's by nan" in problems([math.nan, *LOSSES[1:]])[0]
    assert problems(off, variant=replace(FAST, same_batches=False)) == []
    batches = row(replace(FAST, name="+batches", same_batches=False), 1.0, LOSSES)
    compiled = row(replace(FAST, name="+compile", same_batches=False), 1.0, off)
    result = compared(batches)
    result.rows.append(compiled)
    assert "+compile: losses differ from +batches's by 1.0e-03" in result.problems()[0]
    other = row(FAST, 1.0, LOSSES)
    other.runs[0][0] = replace(other.runs[0][0], checksums=(7,))
    assert "did not see plain's batches" in compared(other).problems()[0]


def test_failures_are_rows_of_the_table() -> None:
    failed = Row(FAST)
    failed.fail(Failure("out of memory", True))
    skipped = Row(replace(FAST, name="+kernels", skipped="no device"))
    result = compared(failed)
    result.rows.append(skipped)
    text = show(result)
    assert "out of memory" in text and "+kernels is not measured: no device." in text
    assert result.problems() == []


@pytest.mark.parametrize("rich", [True, False])
def test_the_footer_explains_every_column(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(__import__("sys").modules, "rich", None)
    fast = row(FAST, 1.0, LOSSES)
    text = show(compared(fast))
    head, footer = text.split("\n\n", 1)
    columns = ("step", "tokens/s", "speed", "peak memory", "loss vs plain", "loss noise")
    assert all(column in head and f"\n  {column} " in footer for column in columns)
    assert "MFU" not in text  # nothing is explained that is not there
    assert "4.00×" in head and "1.00 GB (0.25×)" not in head and "0 equal" in head


def test_each_variant_has_one_feature_more() -> None:
    found = one_by_one({"bf16": "not here"}, chosen=FEATURES)
    by_name = {v.name: v for v in found}
    assert by_name["+bf16 policy"].skipped == "not here"
    options = {name: v.options_for({"attention": "sdpa", "verbose": True}) for name, v in by_name.items()}
    assert options["+kernels"]["kernels"] is not False if "kernels" in options["+kernels"] else True
    assert options["+kernels"]["fused_head"] is False and options["+kernels"]["attention"] == "auto"
    assert "fused_head" not in options["+fused head"] and options["+fused head"]["padding_free"] is False
    assert options["+padding-free"]["attention"] == "sdpa" and options["+padding-free"]["max_tokens_per_batch"] is None
    assert options["+token batches"]["max_tokens_per_batch"] == AS_PADDED
    own = by_name["+token batches"].options_for({"max_tokens_per_batch": 64, "overlong": "skip"})
    assert own["max_tokens_per_batch"] == 64 and own["overlong"] == "skip"
    assert all(o["verbose"] is False for o in options.values())
    assert by_name["+padding-free"].same_batches and not by_name["+token batches"].same_batches


def test_advice_names_the_fastest_options_and_what_slows() -> None:
    kernels = Variant("+kernels", "k", {})
    fast, slow = row(FAST, 1.0, LOSSES), row(kernels, 1.5, LOSSES)
    fast.settings = {
        "padding_free": False,
        "head_backend": "torch",
        "kernels": False,
        "verbose": False,
        "fused_head": False,
    }
    result = compared(fast)
    result.rows += [slow, Row(Variant("+fused head", "h", {}, skipped="not here"))]
    first, second = advice(result)
    assert "Fastest: +head, 4.00 times plain" in first
    # kernels were measured; the head and padding removal were not, so that nothing is said about them
    assert "LigerCallback(kernels=False)" in first
    assert "+kernels is slower here than without it (at best 0.67 times): kernels=False." in second
    assert "What to do with it:" in show(result)


def test_advice_for_a_gpu_that_waits() -> None:
    def lagging(lag: float) -> str:
        fast = row(FAST, 1.0, LOSSES)
        fast.turns = [replace(t, lag=lag, tokens=(3000,) * len(t.seconds)) for t in fast.turns]
        fast.peak_flops = 1e10
        return " ".join(advice(compared(fast))[1:])

    assert "the GPU waits for the host in +head" in lagging(0.02) and "max_tokens_per_batch=12288" in lagging(0.02)
    assert "there is room for more of them" in lagging(0.9) and "10% MFU" in lagging(0.9)


def test_tokens_of_a_batch() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]])
    named = contents(whole_numbers({"input_ids": ids, "attention_mask": (ids != 0).long(), "pixels": torch.rand(2, 3)}))
    assert (named.tokens, named.lengths, named.positions, named.labels, named.parts) == (5, (3, 2), 10, None, 1)
    pairs = contents(
        whole_numbers(
            {
                "chosen_input_ids": ids,
                "chosen_attention_mask": (ids != 0).long(),
                "rejected_input_ids": ids[:, :4],
                "rejected_attention_mask": torch.ones(2, 4, dtype=torch.long),
            }
        )
    )
    assert (pairs.tokens, pairs.positions, pairs.parts) == (13, 18, 2)
    labels = torch.tensor([[7, -100, 7, -100, -100], [8, 9, -100, -100, -100]])
    assert contents(whole_numbers({"input_ids": ids, "labels": labels})).labels == 2  # the first of a row is no target
    listed = contents(whole_numbers([ids, (ids != 0).long(), ids]))
    assert listed.tokens == 5
    assert contents(whole_numbers((torch.rand(2, 5),))).tokens is None
    assert named.checksum != contents(whole_numbers({"input_ids": ids.flip(0), "attention_mask": ids})).checksum


def test_a_smooth_loss_and_a_spike() -> None:
    falling = [3.0 - 0.05 * i + 0.01 * (i % 2) for i in range(20)]
    even = smoothness(falling)
    assert even is not None and even.spikes == 0
    spiky = smoothness([*falling[:12], falling[12] + 2.0, *falling[13:]])
    assert spiky is not None and spiky.spikes == 1 and spiky.noise > 2 * even.noise
    assert smoothness(falling[:3]) is None and smoothness([*falling, math.nan]) is None
