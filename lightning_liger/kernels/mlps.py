"""Gated MLPs: ``down(act(gate(x)) * up(x))`` with SiLU or GELU, as three layers or with gate and up in one.

The projections are called as modules, so that adapters, quantisation and hooks on them stay what they are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.kernels.device import stands_aside
from lightning_liger.kernels.functions import gated
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch, signature
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import features, rows, stand_in, tiny_linear
from lightning_liger.patching import Switch

_ACTIVATIONS = {"swiglu": ("silu",), "geglu": ("gelu_tanh", "gelu")}
_KERNELS = {
    "swiglu": ("_swiglu_forward_kernel", "_swiglu_backward_kernel"),
    "geglu": ("geglu_tanh_forward_kernel", "geglu_tanh_backward_kernel", "exact_geglu"),
}
_GATE_NAMES = ("gate_proj", "w1", "fc_1", "gate", "gate_up_proj", "wi_0", "w_gate", "gate_and_up_proj", "fc1")
_LIMIT_NAMES = ("limit", "swiglu_limit")
_LARGEST = 65536  # one program of Liger's kernels handles one row
_SCALES = (0.3, 1.0, 4.0, 30.0, 100.0)


@dataclass(frozen=True)
class GatedSpec:
    """``gate`` and ``up``: names of the layers; the same name when one layer computes both, gate first.

    ``flipped``: in one layer, up comes first. ``scaled``: attributes multiply the gate and the result (Falcon H1).
    ``limit``: name of the attribute that gate (from above) and up (from both sides) are clamped to (DeepSeek V4).
    """

    activation: str
    gate: str
    up: str
    down: str
    flipped: bool = False
    scaled: bool = False
    limit: str = ""


def _torch_gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _result_is_ours(layer: nn.Module) -> bool:
    """Whether nobody but the caller holds what this layer returns: its result may be overwritten in backward."""
    if layer._forward_hooks or nn.modules.module._global_forward_hooks or "forward" in layer.__dict__:
        return False
    klass = type(layer)
    return isinstance(layer, nn.Linear) or klass.__module__.startswith(("peft.", "bitsandbytes."))


class GatedMLPBinding(KernelBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.aside("not called with one tensor", *args, **kwargs)
        spec: GatedSpec = self.spec
        (x,) = args
        if reason := stands_aside(x):
            return self.aside(reason, x)
        layers = self.module._modules
        gate_layer, up_layer, down = layers[spec.gate], layers[spec.up], layers[spec.down]
        assert gate_layer is not None and up_layer is not None and down is not None
        if spec.gate == spec.up:
            gate, up = gate_layer(x).chunk(2, dim=-1)
            if spec.flipped:
                gate, up = up, gate
        else:
            gate, up = gate_layer(x), up_layer(x)
        if spec.scaled:
            gate = gate * self.module.gate_multiplier
        if spec.limit:
            limit = getattr(self.module, spec.limit)
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        if stands_aside(gate) or stands_aside(up) or gate.dtype != up.dtype or gate.shape != up.shape:
            # the projections gave something that the kernel does not know; torch does
            self.report.ran_original(f"{type(self.module).__name__}: gate and up are no plain tensors of one dtype")
            hidden = _torch_gated(spec.activation, gate, up)
        else:
            self.ran()
            # chunks are copied by the kernel's contiguous(), so nobody else reads those, nor what clamp made
            ours = (
                spec.gate == spec.up or bool(spec.limit) or (_result_is_ours(gate_layer) and _result_is_ours(up_layer))
            )
            hidden = gated(spec.activation, gate, up, overwrite=ours)
        out = down(hidden)
        return out * self.module.down_multiplier if spec.scaled else out


class GatedMLPPatch(KernelPatch):
    """SwiGLU (``op="swiglu"``) or GEGLU (``op="geglu"``)."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.title = {"swiglu": "SwiGLU", "geglu": "GEGLU"}[op]
        self.kernels = _KERNELS[op]

    def _layers(self, module: nn.Module) -> dict[str, tuple[int, int]]:
        found = {n: features(c) for n, c in module._modules.items() if c is not None}
        return {n: f for n, f in found.items() if f is not None}

    def match(self, module: nn.Module) -> bool:
        if any(p is not None for p in module._parameters.values()):
            return False
        layers = self._layers(module)
        others = [c for n, c in module._modules.items() if n not in layers and c is not None]
        if any(True for c in others for _ in itertools.chain(c.parameters(), c.buffers())):
            return False
        if any(isinstance(m, nn.Dropout) and m.p for c in others for m in c.modules()):
            return False
        return bool(self._splits(layers))

    def _splits(self, layers: dict[str, tuple[int, int]]) -> list[tuple[str, str, str]]:
        """``(gate, up, down)`` by shape alone, in the order in which the layers were defined."""
        if len(layers) == 2:
            (a, (a_in, a_out)), (b, (b_in, b_out)) = layers.items()
            if a_out == 2 * b_in and a_in == b_out and b_in <= _LARGEST:
                return [(a, a, b)]
            return [(b, b, a)] if b_out == 2 * a_in and b_in == a_out and a_in <= _LARGEST else []
        if len(layers) != 3:
            return []
        fits = []
        for gate, up, down in itertools.permutations(layers):
            size = layers[gate]
            if layers[up] == size and layers[down] == (size[1], size[0]) and size[1] <= _LARGEST:
                fits.append((gate, up, down))
        return fits

    def is_named(self, module: nn.Module) -> bool:
        # Which of the two patches a module belongs to is only known after the comparison.
        return any(name in module._modules for name in _GATE_NAMES)

    def key(self, module: nn.Module) -> object:
        # the projections are called whatever they are; each quantised or adapted one is an object of its own kind
        layers = self._layers(module)
        sizes = [(n, f, getattr(module._modules[n], "bias", None) is not None) for n, f in layers.items()]
        return (signature(module, without=layers), *sizes)

    def candidates(self, module: nn.Module) -> list[GatedSpec]:
        scaled = all(isinstance(getattr(module, n, None), float) for n in ("gate_multiplier", "down_multiplier"))
        limits = [n for n in _LIMIT_NAMES if isinstance(getattr(module, n, None), (int, float))]
        specs = []
        for limit, activation in itertools.product(limits or [""], _ACTIVATIONS[self.op]):
            for gate, up, down in self._splits(self._layers(module)):
                for flipped in (False, True) if gate == up else (False,):
                    specs.append(GatedSpec(activation, gate, up, down, flipped, scaled, limit))
        return specs

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        layers = self._layers(module)
        gate, up, down = self._splits(layers)[0]
        hidden, width = layers[down]
        small_hidden, small_width = 32, 32 if hidden == width else 16
        sizes = {hidden: small_hidden, width: small_width}
        sizes.setdefault(2 * hidden, 2 * small_hidden)
        doubled = 2 if gate == up else 1
        children = {
            name: tiny_linear(module._modules[name], small_width, doubled * small_hidden, device)  # type: ignore[arg-type]
            for name in {gate, up}
        }
        children[down] = tiny_linear(module._modules[down], small_hidden, small_width, device)  # type: ignore[arg-type]
        return stand_in(module, {}, children, sizes), (rows(_SCALES, small_width, device),)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return GatedMLPBinding(module, switch, spec, report, dtypes)
