"""Two processes: what is sharded, gathered, offloaded or built on meta computes what one process computes."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from typing import Any

import equalities
import modules
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from helpers import causal_lm, collate, config, documents, leave
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.gathering import Gathering, WrittenWhileWhole
from lightning_liger.parallel.generate import RanksDisagree, Rendezvous, sharded_generate
from lightning_liger.parallel.materialize import Materializer, is_meta
from lightning_liger.parallel.prefetch import set_prefetch
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.patching import Switch

CPU = torch.device("cpu")
RANK = 0
KEEP: list[Any] = []


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers)


def sharded(model: Any, *, offload: bool = False) -> Any:
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for block in blocks_of(model):
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return model


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: Any, steps: int = 3) -> list[float]:
    # eps: gradients that are zero but for rounding (of a key's bias) would be steps of full size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    losses = []
    for step in range(steps):
        batch = collate(documents(4, seed=10 * step))
        mine = {n: t[2 * RANK : 2 * RANK + 2] for n, t in batch.items()} if isinstance(model, FSDPModule) else batch
        # the global loss is a mean over tokens; each rank's share of it is scaled to what FSDP's mean makes of it
        count = (mine["labels"][:, 1:] != -100).sum()
        total = (batch["labels"][:, 1:] != -100).sum()
        ranks = dist.get_world_size() if isinstance(model, FSDPModule) else 1
        loss = model(**mine).loss * count / total
        (loss * ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        shared = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(shared)
        losses.append(float(shared))
    return losses


def say(name: str, found: str) -> None:
    if RANK == 0:
        print(f"{name}: {found}", flush=True)


def compare(name: str, model: Any, plain: Any) -> None:
    wanted = train(plain)
    found = train(model)
    worst = max(abs(a - b) / a for a, b in zip(wanted, found, strict=True))
    parameters = dict(plain.named_parameters())
    distance = max(float((whole(p) - parameters[n]).norm() / parameters[n].norm()) for n, p in model.named_parameters())
    assert worst <= 1e-5 and distance <= 1e-5, (name, worst, distance)
    say(name, f"loss {worst:.1e} parameters {distance:.1e}")


def check_recomputing() -> None:
    for kind in ("llama", "gpt2"):
        for mode in ("selective", "full"):
            for offload in (False, True):
                model = causal_lm(kind)
                KEEP.append(switch := Switch(True))
                recompute_blocks(blocks_of(model), mode, switch, lambda _: None)
                model = sharded(model, offload=offload)
                set_prefetch(blocks_of(model), 2)
                compare(f"{kind} checkpointing {mode} offload={offload}", model, causal_lm(kind))
                assert all(p.device == CPU for p in model.parameters())


def check_meta() -> None:
    for kind in ("llama", "qwen2"):
        for before in (True, False):
            torch.manual_seed(3)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config(kind)).train()
            torch.manual_seed(3 + 5 * RANK)  # rank 0's numbers count
            if before:
                filling = Materializer(model, "auto", lambda _: None)
                for part in (*blocks_of(model), model):
                    filling.fill(part, CPU)
                    for tensor in (*part.parameters(), *part.buffers()):
                        if not isinstance(tensor, DTensor):
                            dist.broadcast(tensor.data, 0)
                    fully_shard(part)
            else:
                model = sharded(model)
                filling = Materializer(model, "auto", lambda _: None)
                filling.fill_sharded(model, CPU)
                filling.fill(model, CPU)
                for tensor in model.buffers():
                    dist.broadcast(tensor.data, 0)
            torch.manual_seed(3)
            plain = transformers.AutoModelForCausalLM.from_config(config(kind)).train()
            assert not any(is_meta(t) for t in (*model.parameters(), *model.buffers()))
            for name, parameter in plain.named_parameters():
                assert torch.equal(whole(model.get_parameter(name)), parameter), name
            for name, buffer in plain.named_buffers():
                assert torch.equal(model.get_buffer(name), buffer), name
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "qwen2")
            compare(f"{kind} meta, filled {'before' if before else 'after'} sharding", model, plain)
    with torch.device("meta"):
        broken = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.zeros(2))]))
    try:
        Materializer(broken, "auto", lambda _: None)
    except ValueError as error:
        say("meta, uninitialised", f"raised on both ranks: {'1.0' in str(error)}")
        assert "1.0" in str(error)
    else:
        raise AssertionError


class Passes:
    """Counts all-gathers."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Passes:
        self._before = _fsdp_param_group.foreach_all_gather

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._before(*args, **kwargs)

        _fsdp_param_group.foreach_all_gather = counting
        return self

    def __exit__(self, *_: Any) -> None:
        _fsdp_param_group.foreach_all_gather = self._before


def prompts(rank: int | None = None) -> Tensor:
    return torch.arange(3, 8)[None] + 7 * (RANK if rank is None else rank)


def check_generate() -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6 + 9 * RANK, "eos_token_id": None}
    for kind in ("llama", "gpt2"):
        plain = causal_lm(kind, seed=4).eval()
        wanted = plain.generate(prompts(), **options)
        model = sharded(causal_lm(kind, seed=4).eval())
        notes: list[str] = []
        gathering = Gathering(model, CPU)
        KEEP.append(switch := Switch(True))
        meeting = Rendezvous(timedelta(seconds=20))
        sharded_generate(model, switch, gathering, meeting, notes.append)

        with Passes() as passes:
            assert torch.equal(model.generate(prompts(), **options), wanted)
        assert passes.count == 3, passes.count  # two blocks and the root
        assert all(isinstance(p, DTensor) for p in model.parameters())
        say(f"{kind} generate, gathered for the call", f"{passes.count} all-gathers")

        with gathering.whole(), Passes() as passes:
            for _ in range(1 + RANK):  # unequal numbers of calls
                assert torch.equal(model.generate(prompts(), **options), wanted)
            if RANK == 0:
                model(prompts())
        assert passes.count == 0
        say(f"{kind} generate, whole through the loop", "no all-gather, unequal calls")

        gathering.fits = lambda: False  # type: ignore[method-assign]
        with Passes() as passes:
            assert torch.equal(model.generate(prompts(), **options), wanted)
        assert passes.count >= 2 * 15 and len(notes) == 1
        say(f"{kind} generate, lock step", f"{passes.count} all-gathers")
        for cache in (True, False):
            mine = {**options, "max_new_tokens": 3 + 4 * RANK, "use_cache": cache}
            assert torch.equal(model.generate(prompts(), **mine), plain.generate(prompts(), **mine))
        say(f"{kind} generate, lock step, unequal lengths", notes[-1][:40])
        order = model._get_fsdp_state()._comm_ctx.post_forward_order
        assert order == [], "passes that one rank runs alone must not be what backward prefetches by"
        model.reshard()  # as after any forward, the root is whole; an optimizer is made from its shards
        compare(f"{kind} trains afterwards", model.train(), plain.train())


def check_disagreement() -> None:
    model = sharded(causal_lm("llama").eval())
    meeting = Rendezvous(timedelta(seconds=2))
    KEEP.append(switch := Switch(True))
    sharded_generate(model, switch, Gathering(model, CPU), meeting, lambda _: None)
    if RANK == 0:
        try:
            model.generate(prompts(), max_new_tokens=2)
        except RanksDisagree as error:
            say("generate on one rank", str(error)[:60])
            assert "ranks [1]" in str(error)
        else:
            raise AssertionError
    dist.barrier()
    # what was given up does not stand in the way of what follows
    for _ in range(2):
        model.generate(prompts(), max_new_tokens=2 + RANK, eos_token_id=None)


def check_writing() -> None:
    model = sharded(causal_lm("llama").eval())
    gathering = Gathering(model, CPU)
    with gathering.whole():
        pass
    try:
        with gathering.whole():
            model.model.layers[1].mlp.up_proj.weight.data.add_(1.0)
    except WrittenWhileWhole as error:
        say("written while whole", str(error)[:60])
        assert "layers.1.mlp.up_proj.weight" in str(error)
    else:
        raise AssertionError
    dist.barrier()


# -- through a Trainer -----------------------------------------------------------------------------------------------


class OnMeta(modules.InConfigureModel):
    """Built on ``meta`` where the strategy can fill it; seeded differently on each rank, of which the first one counts."""

    def configure_model(self) -> None:
        if self.model is None:
            meta = type(self.trainer.strategy).__name__.startswith("Liger")
            torch.manual_seed(3 if self.trainer.world_size == 1 else 3 + RANK)
            with torch.device("meta" if meta else "cpu"):
                self.model = transformers.AutoModelForCausalLM.from_config(config("llama")).train()
                self.temperature = nn.Linear(1, 1)


class Generates(modules.InInit):
    """Decodes in validation: different lengths on each rank, and once more on rank 0 alone."""

    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.uneven = uneven
        self.generated: dict[tuple[int, int, str], list[int]] = {}

    def _decode(self, rank: int, where: str) -> None:
        found = self.model.generate(
            prompts(rank), do_sample=False, max_new_tokens=4 + 7 * rank, eos_token_id=None, synced_gpus=None
        )
        self.generated[self.trainer.global_step, rank, where] = found[0].tolist()

    def _ranks(self) -> tuple[int, ...]:
        return (0, 1) if self.trainer.world_size == 1 else (self.global_rank,)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx < 1 + self.global_rank * self.uneven:
            for rank in self._ranks():
                self._decode(rank, "step")

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0 and self.uneven:
            self._decode(0, "end")

    def on_train_batch_end(self, *_: Any) -> None:
        for rank in self._ranks():
            self._decode(rank, "training")


def check_trainer() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    equalities.compare("meta", OnMeta)
    for mode in ("selective", "full"):
        for make in (modules.InInit, lambda: modules.InInit("gpt2"), modules.IsTheModel):
            equalities.compare(f"checkpointing {mode}", make, strategy={"activation_checkpointing": mode})
    everything = {"activation_checkpointing": "full", "offload": True, "prefetch": 2, "reshard_after_forward": False}
    equalities.compare("offload and checkpointing", modules.InInit, strategy=everything, gradient_clip_val=0.3)
    for gather in ("auto", False):
        made: list[Generates] = []

        def make(made: list[Generates] = made, uneven: bool = gather is not False) -> Generates:
            made.append(Generates(uneven))
            return made[-1]

        equalities.compare(
            f"generating, gather_in_evaluation={gather}",
            make,
            strategy={"gather_in_evaluation": gather},
            val_check_interval=2,
        )
        one, two = made[0].generated, made[-1].generated
        mine = {key: tokens for key, tokens in one.items() if key[1] == RANK}
        assert len(mine) >= 6 and two == mine, (two, mine)


def main() -> None:
    global RANK
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    RANK = dist.get_rank()
    check_meta()
    check_recomputing()
    check_generate()
    check_disagreement()
    check_writing()
    check_trainer()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
