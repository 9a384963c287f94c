"""Tokens of a batch divided among ranks: four processes in one launch, and the parts that need none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import causal_lm, config
from torch import Tensor, nn

from lightning_liger.head.shares import Moves
from lightning_liger.padding.buckets import divisible
from lightning_liger.padding.layout import Layout
from lightning_liger.padding.slicing import why_not_sliced
from lightning_liger.parallel.ulysses import OwnHeads, repeats
from lightning_liger.sequence import SequenceGroup

HERE = Path(__file__).parent


def group(rank: int, size: int) -> SequenceGroup:
    return SequenceGroup(None, rank, size)  # type: ignore[arg-type]


def launch(worker: str, processes: int, limit: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = map(str, (HERE, HERE.parent, HERE.parent / "strategy", *sys.path))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command.append(str(HERE / worker))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    checked = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(checked) == int(done.stdout.split("cases: ")[1].split()[0]), done.stdout
    return checked


def test_steps_on_slices_are_those_of_one_process() -> None:
    # some 50 comparisons in two precisions and with two and four ranks, one launch; four processes on two cores
    assert len(launch("ulysses_worker.py", 4, 280)) > 40


@pytest.mark.gpu
def test_slices_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    print("\n".join(launch("ulysses_gpu_worker.py", 2, 280)))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_kernels_take_heads_that_came_in_one_message(heads: tuple[int, int]) -> None:
    from lightning_liger.padding.backends.features import Features
    from lightning_liger.padding.backends.registry import BACKENDS

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    layout = Layout.from_documents(torch.repeat_interleave(torch.tensor([1, 2]), torch.tensor([700, 324]))[None])
    sizes = [n * 64 for n in (heads[0], heads[1], heads[1])]
    message = torch.randn(1024, sum(sizes), device="cuda", dtype=torch.bfloat16)
    tried = 0
    for backend in BACKENDS:
        together = message.clone().requires_grad_()
        parts = [p.unflatten(-1, (-1, 64)).transpose(0, 1)[None] for p in together.split(sizes, -1)]
        features = Features.of(*parts, causal=True, arguments={})
        if backend.run is None or backend.unavailable() or backend.cannot(features):
            continue
        found = backend.run(*parts, layout, features, None)
        found.float().square().mean().backward()
        alone = [p.detach().contiguous().requires_grad_() for p in parts]
        expected = backend.run(*alone, layout, features, None)
        expected.float().square().mean().backward()
        gradients = torch.cat([p.grad[0].transpose(0, 1).flatten(1) for p in alone if p.grad is not None], -1)
        assert torch.equal(found, expected) and together.grad is not None
        torch.testing.assert_close(together.grad, gradients, rtol=2e-2, atol=1e-6)
        tried += 1
    assert tried


# -- whose tokens can be divided -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_tokens_that_meet_in_attention_only(kind: str) -> None:
    assert why_not_sliced(causal_lm(kind).base_model) == ""


def test_experts_look_at_one_token() -> None:
    sizes = {k: getattr(config("llama"), k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    made = transformers.MixtralConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_local_experts=4)
    assert why_not_sliced(transformers.MixtralModel(made)) == ""


class _Shifted(nn.Module):
    """Half of each token's features are its predecessor's, as RWKV and others have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        before = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
        return self.inner(torch.cat([hidden[..., ::2], before[..., 1::2]], -1))


class ShiftedModel(transformers.LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers[0].mlp = _Shifted(self.layers[0].mlp)


def test_tokens_that_meet_elsewhere() -> None:
    assert "meet outside of attention" in why_not_sliced(ShiftedModel(config("llama")))


def test_what_looks_at_all_tokens() -> None:
    model: Any = causal_lm("llama").base_model
    model.layers[0].norm = nn.BatchNorm1d(4)
    assert why_not_sliced(model) == "BatchNorm1d takes the mean over all tokens"


# -- parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "times"),
    [(8, 8, 2, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 6, 4, 2), (6, 2, 4, None), (14, 2, 4, None)],
)
def test_how_often_heads_are_repeated(heads: int, kv: int, ranks: int, times: int | None) -> None:
    assert repeats(heads, kv, ranks) == times


def test_a_layer_with_its_own_heads() -> None:
    class Layer(nn.Module):
        num_key_value_groups = 4
        scaling = 0.5

        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.arange(8.0))

    seen = OwnHeads(Layer(), 8, 1, group(1, 4))
    assert (seen.num_key_value_groups, seen.scaling, seen.training) == (2, 0.5, True)
    assert seen.sinks.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["sorted", "mixed", "repeated", "of one rank"])
def test_rows_reach_whoever_wants_them(size: int, kind: str) -> None:
    count, length = 5, 4
    generator = torch.Generator().manual_seed(size)
    row = torch.randint(0, count * size, (length * size,), generator=generator)
    row = {"sorted": row.sort().values, "mixed": row, "repeated": row % 3, "of one rank": row % count + count}[kind]
    moves = [Moves.of(row, count, group(r, size)) for r in range(size)]
    sent = []
    for r, m in enumerate(moves):
        assert m is not None and sum(m.sent) == len(m.taken)
        sent.append((m.taken + r * count).split(list(m.sent)))
    for r, m in enumerate(moves):
        assert m is not None and list(m.received) == [len(s[r]) for s in sent]
        got = torch.cat([s[r] for s in sent])
        got = got if m.order is None else got[m.order]
        assert torch.equal(got, row[r * length : (r + 1) * length])


def test_rows_that_are_where_they_are_wanted() -> None:
    assert Moves.of(torch.arange(12), 4, group(1, 3)) is None


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_layout_that_can_be_divided(parts: int) -> None:
    layout = Layout.from_mask(torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    made = divisible(layout, parts)
    assert made.size % parts == 0 and made.size - layout.size < parts and sum(made.documents) == made.size
    assert torch.equal(made.index, layout.index) and min(made.documents) > 0
    assert made is layout or divisible(layout, parts) is made
    filled = divisible(layout.lengthened(12, 4, 8), 8)
    assert filled.size == 16 and sum(filled.documents) == 16 and filled.gather[:7].tolist() == layout.gather.tolist()
    assert len(filled.gather) == len(filled.restart) == 16
