"""What stands in for a rotary function in one layer: the same arguments, the same result, on a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_liger.kernels.device import autocast_dtype, stands_aside
from lightning_liger.kernels.registry import Dtypes
from lightning_liger.kernels.rotary_forms import Form, cos_sin, from_bhsd, to_bhsd, to_bsw
from lightning_liger.kernels.rotation import rope


class RopeFunction:
    """The replacement of a rotary function; hands anything unusual to ``original``.

    Args:
        original: the rotary function. form: what it computes. wide: compute in fp32 whatever the dtypes are.
        dtypes: see :class:`KernelBinding`; of the weight stands for: of ``cos``.
        ran: called with each kernel. aside: called with the reason for each call of ``original``.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        form: Form,
        wide: bool,
        dtypes: Dtypes,
        ran: Callable[[], None],
        aside: Callable[[str], None],
    ) -> None:
        self.original = original
        self.form = form
        self.wide = wide
        self.dtypes = dtypes
        self.ran = ran
        self.aside = aside
        self._parameters = list(inspect.signature(original).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states, cos, sin, layouts, reason = self._understand(args, kwargs)
        if reason:
            self.aside(reason)
            return self.original(*args, **kwargs)
        self.ran()
        out = self.dtypes[states[0].dtype, cos.dtype, autocast_dtype(cos.device)]
        q, *keys = (to_bhsd(x, layouts[0]) for x in states)
        cos, sin = (self.form.angles(to_bsw(x, layouts[1])) for x in (cos, sin))
        # the kernels always rotate two tensors: give a single one a head of zeros to go with
        k = keys[0] if keys else q.new_zeros(q.shape[0], 1, *q.shape[2:])
        made = self._rotate(q, k, cos, sin)
        turned = [from_bhsd(x, layouts[0]).to(out) for x in made[: len(states)]]
        return tuple(turned) if self.form.call.states == 2 else turned[0]

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = self.form.rotary_dim(q.shape[-1], cos.shape[-1] * (2 if self.form.reads == "neighbours" else 1))
        assert rotated is not None
        if self.form.part != "last" or rotated == q.shape[-1]:
            return rope(q, k, cos, sin, rotated, self.form.pairs, self.wide)
        turned = rope(q[..., -rotated:], k[..., -rotated:], cos, sin, rotated, self.form.pairs, self.wide)
        first, second = (torch.cat((x[..., :-rotated].to(y.dtype), y), -1) for x, y in zip((q, k), turned, strict=True))
        return first, second

    def _understand(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], Any, Any, tuple[str, str], str]:
        """``(states, cos, sin, layouts, why not)``."""
        nothing: Any = ([], None, None, ("", ""))
        call = self.form.call
        names = self._parameters[: call.arguments]
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        axis = given.pop("unsqueeze_dim", 1)
        if len(args) > len(self._parameters) or given.keys() != set(names):
            return *nothing, "called with further arguments"
        if axis not in (1, 2) or (axis == 2 and not self.form.unsqueezes):
            return *nothing, f"called with unsqueeze_dim={axis}"
        tensors = [given[name] for name in names]
        for x in tensors:
            real = torch.view_as_real(x) if type(x) is Tensor and x.is_complex() else x
            if reason := stands_aside(real):
                return *nothing, reason
        states = tensors[: call.states]
        cos, sin = cos_sin(call, tuple(tensors[call.states :]))
        layouts = ("bshd", "bsw") if axis == 2 else self._layouts(states[0], cos)
        return states, cos, sin, layouts, self._mismatch(states, cos, sin, layouts)

    def _layouts(self, q: Tensor, cos: Tensor) -> tuple[str, str]:
        for states, angles in self.form.shapes:
            if len(states) == q.dim() and len(angles) == cos.dim() and (angles != "s1w" or cos.shape[1] == 1):
                return states, angles
        return "", ""

    def _mismatch(self, states: list[Tensor], cos: Tensor, sin: Tensor, layouts: tuple[str, str]) -> str:
        if not layouts[0] or any(x.dim() != len(layouts[0]) for x in states) or cos.dim() != len(layouts[1]):
            return f"{states[0].dim()}-d states with {cos.dim()}-d angles were not compared"
        q, *keys = (to_bhsd(x, layouts[0]) for x in states)
        if any(k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:] or k.dtype != q.dtype for k in keys):
            return "queries and keys differ in length, head size or dtype"
        angles = to_bsw(cos, layouts[1])
        if cos.shape != sin.shape or angles.shape[1] != q.shape[2] or angles.shape[0] not in (1, q.shape[0]):
            return "cos and sin do not have one row per position"
        if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype:
            return "cos and sin are trained, or of two dtypes"
        if (width := self.form.rotary_dim(q.shape[-1], cos.shape[-1])) is None or width % 2:
            return f"head size {q.shape[-1]} with {cos.shape[-1]} rotary entries was not compared"
        if (q.dtype, cos.dtype, autocast_dtype(q.device)) not in self.dtypes:
            return f"the comparison has no {q.dtype} input with {cos.dtype} angles"
        return ""
