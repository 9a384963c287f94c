"""How the decoder blocks of packed backbones run: chosen by options or by timing, then bound to all of them.

Timing happens inside of the first training call, where the first block has real inputs and whole parameters, under
whatever strategy. What it finds is bound before the next batch: a block that is recomputed in backward must be the
block that ran.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from lightning_liger.choices import CompileChoice
from lightning_liger.compilation.apply import compiled, recorded, stack_of, why_not_recorded
from lightning_liger.compilation.block import Graphs
from lightning_liger.hooks import TrainingHooks
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.padding.buckets import ShapeBuckets
from lightning_liger.patching import Rebound, Switch, bindings_of
from lightning_liger.report import BlocksReport, Report
from lightning_liger.tuning import candidates, store
from lightning_liger.tuning.decision import Decision, Plan

_BACKEND: str | Callable[..., Any] = "inductor"
_SHAPES = 3  # that are recorded; each holds the gradients of all blocks once, and perhaps activations
_SEEN_BEFORE = 4  # batches of a shape before it is recorded, which takes as long as some steps
_PATIENCE = 8  # batches of a size before code is made for it, where nobody asked for that: seconds for milliseconds
_BATCHES = 3  # without a packed call, after which nobody waits for one any more


def can_time(device: torch.device | None = None) -> bool:
    """Whether ``device``, or any device there is, is one whose time is worth finding out about."""
    return torch.cuda.is_available() and (device is None or device.type == "cuda")


class BlockRuns:
    """The blocks of all packed backbones of one ``accelerate`` call.

    Args:
        choice: the ``compile`` option.
        report: its ``blocks`` are filled.
        switch: turns all bindings on and off.
        buckets: turned on where shapes matter.
        keep: binds, and remembers to take it back.

    Attributes:
        tuned_ops: the kernels whose use is to be decided by timing.
        settled: nothing is left to decide or to bind.
        driven: hooks of a training say when a batch begins.
        waits: nothing is decided before that; what runs earlier are trials of another kind.
    """

    def __init__(
        self,
        choice: CompileChoice,
        report: Report,
        switch: Switch,
        buckets: ShapeBuckets,
        keep: Callable[[Rebound], None],
    ) -> None:
        self.choice = choice
        self.report: BlocksReport = report.blocks
        self.tuned_ops: set[str] = set()
        self.decision: Decision | None = None
        self.settled = False
        self.driven = False
        self.waits = False
        self._whole_report = report
        self._switch = switch
        self._buckets = buckets
        self._keep = keep
        self._stacks: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._watch: Any = None
        self._size: int | None = None
        self._tried = False
        self._graphs = Graphs(_BACKEND, self.report.refuse, 0 if choice in (True, "cudagraphs") else _PATIENCE)
        if choice is False:
            self.settled = True
        elif choice is not True and choice != "cudagraphs":
            self.settled = not can_time()
        else:
            self.decision = Decision(Plan((), True, choice == "cudagraphs"))
        if choice == "cudagraphs" and not torch.cuda.is_available() and _BACKEND == "inductor":
            raise ValueError("compile='cudagraphs' needs a CUDA device. Set compile='auto', or True.")

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockRuns:
        return self

    def close(self) -> None:
        """Ask for nothing any more."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    # -- what there is -----------------------------------------------------------------------------------------------

    def add(self, backbone: nn.Module) -> None:
        """A backbone whose padding is removed."""
        blocks = stack_of(backbone)
        if not blocks:
            if self.choice not in (False, "auto"):
                self.report.refuse(f"{type(backbone).__name__} has no list of like blocks to compile")
            return
        self._stacks[backbone] = [weakref.ref(block) for block in blocks]
        self.report.found += len(blocks)
        if not self.settled and self.choice is not False:
            self._buckets.turn_on_if_auto()
        elif self.settled and self.decision is not None:
            self._bind(backbone, self.decision.plan)

    def times_kernels(self) -> bool:
        """Whether kernels may be bound that are perhaps not used in the end."""
        return not self.settled and self.decision is None

    def _blocks(self, backbone: nn.Module) -> list[nn.Module]:
        return [block for ref in self._stacks[backbone] if (block := ref()) is not None]

    # -- timing ------------------------------------------------------------------------------------------------------

    def before_call(self, backbone: nn.Module, size: int) -> None:
        """Called before each packed call of ``backbone`` with gradients, over ``size`` tokens."""
        if backbone not in self._stacks or self.waits:
            return
        if self._size is None:
            self._size = size
            self._graphs.admit(size)  # the one that is timed
        self._graphs.meet(size)
        if not self.driven:
            self._graphs.settle()
        if self.settled:
            return
        if self.decision is not None:
            # a Trainer's hooks engage it between two batches; elsewhere this is the moment
            if not self.driven and _world() == 1:
                self.engage(self.decision)
            return
        if self._tried or self._watch is not None or not _is_first_rank():
            return
        first = self._blocks(backbone)[0]
        if not can_time(next(first.parameters()).device):
            self.decision = Decision(candidates.without_timing(self.tuned_ops, backbone))
            return
        self._watch = first.register_forward_pre_hook(self._first_call(backbone), with_kwargs=True)

    def _first_call(self, backbone: nn.Module) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._watch.remove()
            self._watch, self._tried = None, True
            with self._whole_report.unnoticed():
                self.decision = self._decide(backbone, block, args, kwargs)
            self.report.pending = self._tell(self.decision)

        return hook

    def _decide(self, backbone: nn.Module, block: nn.Module, args: Any, kwargs: Any) -> Decision:
        begin = time.perf_counter()
        blocks = self._blocks(backbone)
        problem = why_not_recorded(backbone, blocks)
        options = candidates.Options(
            ops=tuple(sorted(self.tuned_ops)),
            compile=self.choice is not False,
            record="" if self.choice == "auto" and not problem else problem or "compile=False",
            graphs=self._graphs,
        )
        key = candidates.key(backbone, block, kwargs, options)
        if (known := store.load(key)) is not None:
            return known
        try:
            made = candidates.decide(backbone, block, len(blocks), args, kwargs, options)
        except Exception as error:  # whatever timing meets, training goes on by the rule that holds without it
            self.report.refuse(f"not timed: {type(error).__name__}: {error}"[:200])
            return Decision(candidates.without_timing(self.tuned_ops, backbone))
        decision = Decision(made.plan, made.costs, made.problems, time.perf_counter() - begin)
        store.save(key, decision)
        return decision

    def between_batches(self) -> None:
        """No backward is to come that would have to run what its forward ran."""
        self._graphs.settle()

    # -- binding -----------------------------------------------------------------------------------------------------

    def engage(self, decision: Decision) -> None:
        """Let all blocks run as decided, from now on."""
        self.settled, self.decision = True, decision
        for backbone in list(self._stacks):
            self._bind(backbone, decision.plan)
        self.report.applied, self.report.pending = self._tell(decision), 0
        if not decision.plan.compiled and not decision.plan.recorded and self._buckets.choice == "auto":
            self._buckets.on = False

    def _tell(self, decision: Decision) -> int:
        """How many blocks do not run as they are."""
        self.report.decided = decision.describe()
        for name, problem in decision.problems.items():
            self.report.refuse(f"{name}: {problem}")
        return self.report.found if decision.plan.compiled or decision.plan.recorded else 0

    def give_up(self, reason: str) -> None:
        """Go on by the rule that holds without timing."""
        self.report.refuse(reason)
        for backbone in list(self._stacks):
            self.engage(Decision(candidates.without_timing(self.tuned_ops, backbone)))
            return
        self.settled = True

    def _bind(self, backbone: nn.Module, plan: Plan) -> None:
        blocks = self._blocks(backbone)
        inside = {m for block in blocks for m in block.modules()} if plan.compiled else set()
        for kernel in (b for m in backbone.modules() for b in bindings_of(m) if isinstance(b, KernelBinding)):
            if kernel.module in inside:
                kernel.rest("not used inside of compiled blocks")
            elif kernel.op in self.tuned_ops:
                kernel.rest("" if kernel.op in plan.ops else "not used, because it is slower here")
        made: list[Rebound] = []
        if plan.compiled:
            made += compiled(blocks, backbone, self._switch, self._graphs)
            for binding in made:
                self._keep(binding)
        if plan.recorded:
            problem = why_not_recorded(backbone, blocks)
            if problem:
                self.report.refuse(f"CUDA graphs: not recorded: {problem}")
            else:
                ready = self._graphs.takes if plan.compiled else lambda size: True
                before = 2 if self.choice == "cudagraphs" else _SEEN_BEFORE
                for binding in recorded(blocks, self._switch, _SHAPES, self.report.refuse, ready, before):
                    self._keep(binding)


class BlockTuning(TrainingHooks):
    """Engages what was decided before the next batch, the same on every rank: rank 0 decides.

    Args:
        runs: of the accelerated module; asked for anew, because ``accelerate`` may be called again.
    """

    def __init__(self, runs: Callable[[], BlockRuns]) -> None:
        self._runs = runs
        self._batches = 0

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        runs = self._runs()
        runs.driven, runs.waits = True, False
        runs.between_batches()
        if runs.settled:
            return
        decision = runs.decision
        if runs.choice in ("auto", False) and _world() > 1:
            decision = _of_first_rank(decision, trainer.strategy.root_device)
        if decision is not None:
            runs.engage(decision)
        elif self._batches >= _BATCHES:
            runs.give_up(f"not timed: no packed training call in {_BATCHES} batches")
        self._batches += 1


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_first_rank() -> bool:
    return _world() == 1 or dist.get_rank() == 0


def _of_first_rank(decision: Decision | None, device: torch.device) -> Decision | None:
    given: list[Any] = [decision]
    dist.broadcast_object_list(given, src=0, device=device)
    found: Decision | None = given[0]
    return found
