"""The kernel patches: what each matches, what it tries, how it binds, and what shows that it ran.

A patch never changes a class, a module of Python code or a function of a library: it binds a :class:`KernelBinding` on
one instance, which the switch of that ``accelerate`` call turns off and ``unbind()`` takes away.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.report import OpReport
from lightning_liger.patching import Rebound, Switch

Dtypes = dict[tuple[torch.dtype, torch.dtype, "torch.dtype | None"], torch.dtype]
_NUMBERS = itertools.count()


class KernelBinding(Rebound):
    """``forward`` of one module on a kernel.

    Args:
        module, switch: see :class:`Rebound`.
        spec: the candidate of the patch that was found equal.
        report: counts calls.
        dtypes: dtype of the original's output by (dtype of the input, of the weight, of autocast or None).

    Attributes:
        op: the key in ``kernels={"<op>": True}``.
        by_row: what comes out for one token depends on this token alone, not on its place.
    """

    by_row = True
    op = ""

    def __init__(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> None:
        super().__init__(module, switch)
        self.spec = spec
        self.report = report
        self.dtypes = dtypes
        self.number = next(_NUMBERS)

    @property
    def feature(self) -> str:  # type: ignore[override]
        return self.report.title

    @property
    def has_run(self) -> bool:
        return self.number in self.report.ran_on

    @property
    def launches(self) -> tuple[str, ...]:
        return self.report.kernels

    def rest(self, reason: str) -> None:
        """Leave the module to its own code, and count why; ``""`` takes that back."""
        if bool(reason) != self.resting:
            self.resting = bool(reason)
            self.report.applied += -1 if reason else 1
            self.report.rests(reason)

    def ran(self) -> None:
        """Count one call of the kernel."""
        self.runs += 1
        self.report.calls += 1
        self.report.ran_on.add(self.number)

    def aside(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Run the original code, and count why."""
        self.why = reason
        self.report.ran_original(f"{type(self.module).__name__}: {reason}")
        return self.original(*args, **kwargs)


class KernelPatch(ABC):
    """One kind of kernel.

    Attributes:
        op: the key in ``kernels={"<op>": True}``.
        title: the name in reports.
        kernels: names, or parts of names, of the GPU kernels that a profiler shows when it ran.
    """

    op: str
    title: str
    kernels: tuple[str, ...]

    @abstractmethod
    def match(self, module: nn.Module) -> bool:
        """Whether the module has the structure. Cheap: attributes and shapes only, no computation."""

    def is_named(self, module: nn.Module) -> bool:
        """Whether its name says so too: only then a module that turns out different is worth a line in the report."""
        return True

    @abstractmethod
    def candidates(self, module: nn.Module) -> Sequence[Any]:
        """Hashable descriptions of what the module may compute, the likeliest first. Each is tried until one fits."""

    @abstractmethod
    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A stand-in of the same class with random fp32 parameters on ``device``, and inputs for its ``forward``.

        It must not share parameters with ``module``, which may be sharded, quantised or on the meta device. Inputs
        that require a gradient get theirs compared.
        """

    def cast(
        self, trial: nn.Module, inputs: tuple[Tensor, ...], x: torch.dtype, weight: torch.dtype
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Trial and inputs with activations in ``x`` and parameters in ``weight``; both are fresh copies."""
        moved = copy.deepcopy(trial).to(weight)
        return moved, tuple(i.detach().to(x).requires_grad_(i.requires_grad) if _floats(i) else i for i in inputs)

    def key(self, module: nn.Module) -> object:
        """Modules with equal keys compute the same function of their parameters; one of them is tried for all."""
        return signature(module)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        """The binding of a candidate; not bound yet."""
        raise NotImplementedError

    def candidate(self, trial: nn.Module, spec: Any, dtypes: Dtypes) -> Callable[..., Any]:
        """What is compared with the trial's own ``forward``; raises where it would run the original code itself."""
        report = OpReport(self.title)
        return strict(self.binding(trial, Switch(True), spec, report, dtypes).call, report)

    def comparing(self) -> AbstractContextManager[None]:
        """Entered around a comparison; whatever it changes must be as before when it is left."""
        return nullcontext()

    def compared(self, device: torch.device) -> tuple[torch.dtype, ...]:
        """The dtypes in which a candidate must agree; its binding runs in no other."""
        return (torch.float32, torch.bfloat16)

    def refusal(self, module: nn.Module) -> str:
        """A reason to leave a module that matches alone, or ``""``."""
        return ""


def strict(call: Callable[..., Any], report: OpReport) -> Callable[..., Any]:
    """``call``, with an error instead of a silent fallback: the original compared with itself would always agree."""

    def checked(*args: Any) -> Any:
        out = call(*args)
        if report.original_calls:
            raise RuntimeError(next(iter(report.original_calls)))
        return out

    return checked


def _floats(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


_IGNORED = {"training", "layer_idx", "layer_id", "_is_hf_initialized", "call_super_init", "dump_patches"}


def signature(module: nn.Module, without: Collection[str] = ()) -> object:
    """Class, plain attributes, and the shape of parameters and children; what a module computes follows from these.

    Args:
        without: names of children that do not matter.
    """
    parts: list[object] = [type(module)]
    for name, value in sorted(vars(module).items()):
        if name in _IGNORED or name.endswith("_hooks") or name in ("_parameters", "_buffers", "_modules", "forward"):
            continue
        if isinstance(value, (str, int, float, bool, tuple, type(None))):
            parts.append((name, str(value)))
        elif name.startswith("_") and isinstance(value, (dict, set)):
            continue
        else:
            parts.append((name, id(value)))
    parts += [(name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items()]
    for name, child in module._modules.items():
        if child is not None and name not in without:
            parts.append((name, signature(child)))
    return tuple(parts)


_REGISTRY: list[KernelPatch] = []


def register_kernel(patch: KernelPatch, *, first: bool = False) -> None:
    """Add a patch of your own, for every later ``accelerate`` call.

    Args:
        patch: its ``op`` becomes a key of the ``kernels`` option; several patches may share one.
        first: ask it before those that are there.

    Raises:
        TypeError: not a :class:`KernelPatch`, or without ``op``, ``title`` and ``kernels``.
    """
    if not isinstance(patch, KernelPatch):
        raise TypeError(f"register_kernel takes a KernelPatch, not {type(patch).__name__}.")
    for name, kind in (("op", str), ("title", str), ("kernels", tuple)):
        if not isinstance(getattr(patch, name, None), kind):
            raise TypeError(f"{type(patch).__name__}.{name} must be a {kind.__name__}.")
    registered()  # the built-in ones come first unless asked otherwise
    _REGISTRY.insert(0 if first else len(_REGISTRY), patch)


def unregister_kernel(patch: KernelPatch) -> None:
    """Forget a registered patch; modules that it is bound to keep it until they are reverted."""
    _REGISTRY.remove(patch)


def registered() -> list[KernelPatch]:
    """All patches, in the order in which they are asked."""
    if not _REGISTRY:
        from lightning_liger.kernels.activations import ReLUSquaredPatch
        from lightning_liger.kernels.experts import ExpertsPatch
        from lightning_liger.kernels.gated_norms import GatedRMSNormPatch
        from lightning_liger.kernels.mlps import GatedMLPPatch
        from lightning_liger.kernels.norms import LayerNormPatch, RMSNormPatch
        from lightning_liger.kernels.rotary import RopePatch
        from lightning_liger.kernels.rotary_modules import RotaryModulePatch

        _REGISTRY.extend((RMSNormPatch(), GatedRMSNormPatch(), LayerNormPatch()))
        _REGISTRY.extend((GatedMLPPatch("swiglu"), GatedMLPPatch("geglu"), ExpertsPatch()))
        _REGISTRY.extend((RopePatch(), RotaryModulePatch(), ReLUSquaredPatch()))
    return list(_REGISTRY)


def known_ops() -> list[str]:
    """The keys that ``kernels={…}`` may have."""
    return list(dict.fromkeys(patch.op for patch in registered()))
