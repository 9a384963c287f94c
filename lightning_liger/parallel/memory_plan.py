"""What a training step will hold in memory, against what the device has, and what would make it fit.

Peaks of four moments are compared, because what they hold is not there at the same time:

* *forward ends*: all activations, the gathered parameters, one chunk of logits with the gradients of the head;
* *backward begins*: all activations, of the last block also those that are computed again, and what its backward makes;
* *backward ends*: all gradients, and the root's before and while they are reduced;
* *the optimizer steps*: gradients, state, and the temporaries of optimizers that are not fused.

Gradients of the step before are gone by then (:func:`lightning_liger.parallel.gradients.free_old_gradients`).
Parameters, gradients and optimizer state are counted from the sharded tensors themselves (Rajbhandari et al., "ZeRO"
(2020), section 3, with FSDP's gathered blocks added), activations by
:mod:`lightning_liger.parallel.activations`.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_liger.parallel.activations import Activations
from lightning_liger.parallel.selecting import Selection

# Caching allocators cannot use all that they hold, and what kernels need for themselves is in no plan.
FRACTION_USABLE = 0.95
# Workspaces of libraries and small tensors that nobody counts, as seen on H200s.
UNCOUNTED = 2**28
_GIB = 2**30


@dataclass(frozen=True)
class State:
    """Bytes per rank that do not depend on the batch.

    Attributes:
        parameters: shards. gradients: their gradients, for those that train. optimizer: its state, once it has stepped.
        root: the root group's parameters gathered. block: the largest block's. blocks: all blocks'.
        root_gradients: the root's unsharded gradients in the dtype that they are computed in.
        reduced: the same in the dtype that they are reduced in. block_reduced: the largest block's.
        accumulated: gradients of all parameters, whole, as accumulation keeps them between micro-batches.
        temporaries: what an optimizer that is not fused allocates during its step.
        in_flight: how many blocks are gathered at a time.
        ranks: over how many ranks a parameter is spread.
        offload: parameters, gradients and optimizer state are in host memory.
        keeps_blocks: blocks stay gathered between forward and backward.
    """

    parameters: int
    gradients: int
    optimizer: int
    root: int
    block: int
    blocks: int
    root_gradients: int
    reduced: int
    block_reduced: int = 0
    accumulated: int = 0
    temporaries: int = 0
    in_flight: int = 2
    ranks: int = 1
    offload: bool = False
    keeps_blocks: bool = False

    @property
    def gathered(self) -> int:
        """The root, and blocks as they arrive: the last one's buffer goes when the next one's is there."""
        arriving = self.block * (1 + 1 / max(self.ranks, 1)) if self.ranks > 1 else 0
        blocks = self.blocks if self.keeps_blocks else min(self.in_flight * self.block, self.blocks)
        return self.root + round(blocks + arriving)

    def spread_over(self, ranks: int) -> State:
        """The same model on another number of ranks."""

        def share(size: int) -> int:
            return -(-size * self.ranks // ranks)

        return replace(
            self,
            ranks=ranks,
            parameters=share(self.parameters),
            gradients=share(self.gradients),
            optimizer=share(self.optimizer),
            temporaries=share(self.temporaries),
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Expected peak of one device in a training step.

    Attributes:
        state: what does not depend on the batch. activations: what does.
        head: logits of one chunk (of all rows, where the head is not fused) and the gradients made with them.
        head_kept: what of it waits for backward.
        tokens: positions of the observed batch that take part. capacity: bytes that this process may have.
        checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        accumulates: gradients of earlier micro-batches are there.
        frees_gradients: those of the step before are not.
        chosen: what selective checkpointing keeps, once all ranks have agreed.
        offloads: what blocks keep waits in host memory; None where that is where the device's is.
        slices: among how many ranks the batch's tokens are divided. divisible: larger numbers that would do.
    """

    state: State
    activations: Activations
    head: int
    tokens: int
    capacity: int
    checkpointing: str = "none"
    accumulates: bool = False
    head_kept: int = 0
    frees_gradients: bool = True
    chosen: Selection | None = None
    slices: int = 1
    divisible: tuple[int, ...] = ()
    offloads: bool | None = None

    @functools.cached_property
    def selection(self) -> Selection:
        """What selective checkpointing keeps of each block: what was chosen, or what fits."""
        if self.chosen is not None:
            return self.chosen
        limit, room = round(FRACTION_USABLE * self.capacity), 0
        for _ in range(2):  # what is kept of the last block is not computed again: there is more room than without
            selection = self.activations.selection(room)
            found = self.moments_with(selection)
            held = max(found["forward ends"], found["backward begins"]) - selection.kept(self.activations.tokens)
            room = max(0, limit - held)
        return self.activations.selection(room)

    def moments(self) -> dict[str, int]:
        """Bytes on the device at each of the four moments."""
        return self.moments_with(self.selection if self.checkpointing == "selective" else Selection())

    def moments_with(self, selection: Selection) -> dict[str, int]:
        """The same if checkpointing keeps what ``selection`` says."""
        s, a, mode = self.state, self.activations, self.checkpointing
        kept = UNCOUNTED + (0 if s.offload else s.parameters + s.optimizer)
        gradients = 0 if s.offload else s.gradients
        earlier = s.accumulated if self.accumulates else 0 if self.frees_gradients else gradients
        activations = a.kept(mode, selection) - self._moved
        one_block = a.computed_again(mode, selection) + a.backward + s.block_reduced
        last = max(s.root, s.reduced) + s.root_gradients
        return {
            "forward ends": kept + earlier + s.gathered + activations + self.head,
            "backward begins": kept
            + (s.accumulated if self.accumulates else 0)
            + s.gathered
            + activations
            + one_block
            + self.head_kept,
            "backward ends": kept + gradients + max(last, s.root + self.head_kept + a.block + a.backward),
            "optimizer steps": kept + gradients + (0 if s.offload else s.temporaries),
        }

    @property
    def peak(self) -> int:
        return max(self.moments().values())

    @property
    def fits(self) -> bool:
        return self.peak <= FRACTION_USABLE * self.capacity

    @property
    def host(self) -> int:
        """Bytes of host memory per rank."""
        s = self.state
        return self._moved + (s.parameters + s.gradients + s.optimizer + s.temporaries if s.offload else 0)

    @property
    def _moved(self) -> int:
        return self.activations.on_host(self.checkpointing) if self.offloads else 0

    def remedies(self) -> list[str]:
        """Single switches, then pairs, that make it fit; empty if it does."""
        if self.fits:
            return []
        single = self._switches()
        found = [text for text, plan in single if plan.fits]
        if not found:
            pairs = ((f"{a} with {b}", q) for a, plan in single for b, q in plan._switches())
            found = [text for text, plan in pairs if plan.fits][:3]
        return found or ["nothing that this strategy offers; use a smaller model, or train adapters (PEFT)"]

    def _switches(self) -> list[tuple[str, MemoryPlan]]:
        made: list[tuple[str, MemoryPlan]] = []
        order, base = ("none", "selective", "full"), replace(self, chosen=None)
        for mode in order[order.index(self.checkpointing) + 1 :]:
            made.append((f"activation_checkpointing={mode!r}", replace(base, checkpointing=mode)))
        if self.state.keeps_blocks:
            less = replace(self.state, keeps_blocks=False)
            made.append(("reshard_after_forward=True", replace(base, state=less)))
        if self.offloads is False:
            made.append(("activation_offload=True", replace(base, offloads=True)))
        for slices in self.divisible:
            factor = slices // self.slices
            smaller = self.activations.scaled(1 / factor)
            divided = replace(base, activations=smaller, tokens=self.tokens // factor, slices=slices, divisible=())
            if divided.fits:
                made.append((f"sequence_parallel_size={slices}", divided))
                break
        if not self.state.offload:
            made.append(("offload=True (slower)", replace(base, state=replace(self.state, offload=True))))
        for factor in (2, 4, 8, 16, 32, 64):
            more = replace(base, state=self.state.spread_over(self.state.ranks * factor))
            if more.fits:
                made.append((f"{self.state.ranks * factor} GPUs", more))
                break
        for factor in (2, 4, 8, 16):
            fewer = self._with_fewer_tokens(factor)
            if fewer.fits:
                made.append((f"batches of {fewer.tokens:,} tokens per rank (1/{factor} of these, accumulated)", fewer))
                break
        return made

    def _with_fewer_tokens(self, factor: int) -> MemoryPlan:
        less = self.activations.scaled(1 / factor)
        return replace(self, activations=less, tokens=self.tokens // factor, accumulates=True, chosen=None)

    # -- for people and machines ---------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, int]]:
        s = self.state
        where = " (host memory)" if s.offload else ""
        return [
            (f"parameters, {'shard' if s.ranks > 1 else 'masters'}{where}", s.parameters),
            (f"gradients{where}", s.gradients),
            (f"optimizer state{where}", s.optimizer),
            ("gathered: root and blocks in flight", s.gathered),
            (f"activations of {self.tokens:,} tokens, checkpointing {self.checkpointing}", self._activations),
            *([("activations in host memory", self._moved)] if self.offloads else []),
            ("logits and gradients of the head", self.head),
        ]

    @property
    def _activations(self) -> int:
        selection = self.selection if self.checkpointing == "selective" else Selection()
        again = self.activations.computed_again(self.checkpointing, selection)
        return self.activations.kept(self.checkpointing, selection) + again - self._moved

    def render(self) -> str:
        """The plan as text."""
        width = max(len(name) for name, _ in self.rows())
        lines = ["lightning-liger memory plan, per device"]
        lines += [f"  {name:<{width}}  {size / _GIB:9.2f} GiB" for name, size in self.rows()]
        moment, peak = max(self.moments().items(), key=lambda item: item[1])
        share = f"{peak / max(self.capacity, 1):.0%} of {self.capacity / _GIB:.1f} GiB"
        lines.append(f"  {f'expected peak, when {moment}':<{width}}  {peak / _GIB:9.2f} GiB, {share}")
        if self.checkpointing == "selective" and self.activations.counted:
            lines.append(f"  of each block is kept: {self.selection.describe(self.activations.tokens)}")
        if not self.activations.counted:
            lines.append("  activations are estimated from the linear layers alone")
        if not self.fits:
            lines.append("  This is not expected to fit. It would with one of:")
            lines += [f"    - {text}" for text in self.remedies()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.state),
            "activations": self._activations,
            "activations_counted": self.activations.counted,
            "head": self.head,
            "head_kept": self.head_kept,
            "tokens": self.tokens,
            "slices": self.slices,
            "checkpointing": self.checkpointing,
            "activations_on_host": self._moved,
            "kept": self.selection.describe(self.activations.tokens) if self.checkpointing == "selective" else "",
            "moments": self.moments(),
            "peak": self.peak,
            "capacity": self.capacity,
            "host": self.host,
            "fits": self.fits,
            "remedies": self.remedies(),
        }
