"""The step of ``torch.optim.Adam`` and ``AdamW`` for all parameters at once, in place of the optimizer's own.

The optimizer stays the user's: its class, groups, hooks and schedulers, and the layout of its state. Only ``step`` is
another, and, where that is asked for, both moments are bf16.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_liger.optim.formula import Row, row_of, update
from lightning_liger.optim.places import Place, alike, local, noise_key, place_of
from lightning_liger.parallel.clipping import global_norm

MOMENTS = ("exp_avg", "exp_avg_sq")
_TAKEN: weakref.WeakKeyDictionary[Optimizer, FusedStep] = weakref.WeakKeyDictionary()


def fused_step_of(optimizer: Any) -> FusedStep | None:
    """What steps in place of ``optimizer``, if something does."""
    return _TAKEN.get(getattr(optimizer, "_optimizer", optimizer))


class FusedStep:
    """Steps for one optimizer from now on, with one launch where a kernel can, else in PyTorch's operators.

    Args:
        optimizer: an ``Adam`` or ``AdamW`` that :func:`lightning_liger.optim.fitness.why_not` has no word against.
        state_dtype: of both moments; None: the parameters' own, which then is fp32.
        kernel: whether Triton runs where the parameters are.
    """

    def __init__(self, optimizer: Optimizer, state_dtype: torch.dtype | None, *, kernel: bool) -> None:
        self.state_dtype = state_dtype
        self.kernel = kernel
        self._optimizer = weakref.ref(optimizer)
        self._parameters: list[Tensor] = []
        self._state: Any = None
        self._states: list[dict[str, Any]] = []
        self._known: np.ndarray = np.empty(0, np.int64)
        self._moments: list[list[Any]] = [[], []]
        self._steps = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._group_of: list[int] = []
        self._keys: list[int] = []
        self._turned: set[int] = set()
        self._places: list[tuple[Place, list[int], Any]] = []
        self._factor: Tensor | None = None
        self._leave_clipped = False
        self._arriving: list[dict[str, Any]] = []
        _TAKEN[optimizer] = self
        optimizer.register_load_state_dict_pre_hook(self._keep_apart)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        optimizer.step = self._as_step(optimizer)  # type: ignore[method-assign]
        self._forget()

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _forget(self) -> None:
        """State is another one: read it again, moments in their dtype."""
        self._parameters, self._factor = [], None
        for parameter, state in self.optimizer.state.items():
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(self.state_dtype or parameter.dtype)

    # ``load_state_dict`` casts whatever it loads to the parameters' dtype. Moments in another one pass by it.

    def _keep_apart(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        self._arriving = [{k: v for k, v in state_dict["state"].get(n, {}).items() if k in MOMENTS} for n in numbers]
        rest = {n: {k: v for k, v in s.items() if k not in MOMENTS} for n, s in state_dict["state"].items()}
        return {**state_dict, "state": rest}

    def _loaded(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, moments in zip(parameters, self._arriving, strict=True):
            dtype = self.state_dtype or parameter.dtype
            for name, value in moments.items():
                optimizer.state[parameter][name] = value.to(device=parameter.device, dtype=dtype)
        self._arriving = []
        self._forget()

    def moment_bytes(self, parameter: Tensor) -> int:
        """Of both moments of one entry of ``parameter``."""
        return 2 * (self.state_dtype or parameter.dtype).itemsize

    # -- a step --------------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float, *, leave_clipped: bool) -> Tensor:
        """Have the next step multiply gradients so that their norm is at most ``max_norm``. A collective.

        Args:
            leave_clipped: whoever reads gradients after the step finds them multiplied; otherwise the step frees them.

        Returns:
            Their norm over all ranks: fp32, ``()``.
        """
        with torch.no_grad():
            norm = self._norm()
            self._factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            self._leave_clipped = leave_clipped
        return norm

    def _norm(self) -> Tensor:
        addresses, squares = self._gather()[1], None
        for place, numbers, tables in self._places:
            if tables is None:
                found = global_norm([g for g in (self._parameters[i].grad for i in numbers) if g is not None]).square()
            else:
                tables.take(addresses[numbers])
                tables.send(addresses[numbers])
                found = tables.squares()
                for group in place.groups:
                    dist.all_reduce(found, group=group)
            squares = found if squares is None else squares + found
        return torch.zeros((), dtype=torch.float32) if squares is None else squares.sqrt()

    @torch.no_grad()
    def update(self) -> None:
        """One step of the optimizer's, closure and hooks aside."""
        gradients, addresses = self._gather()
        factor, self._factor = self._factor, None
        rows, rows_of = self._count(gradients)
        for _, numbers, tables in self._places:
            if tables is not None:
                own = addresses[numbers]
                tables.take(own)
                tables.send(own, rows, [rows_of[i] for i in numbers])
                tables.adam(factor, self._leave_clipped)
                continue
            for i in numbers:
                gradient = gradients[i]
                if gradient is None:
                    continue
                if factor is not None:
                    scale = factor.to(gradient.device, gradient.dtype)
                    gradient = gradient.mul_(scale) if self._leave_clipped else gradient * scale
                first, second = (local(moments[i]) for moments in self._moments)
                update(local(self._parameters[i]), gradient, first, second, rows[rows_of[i]], self._keys[i])
        torch.autograd.graph.increment_version(self._parameters)
        if factor is not None and not self._leave_clipped:
            # nobody is to find them as they were before clipping
            for parameter in self._parameters:
                parameter.grad = None

    def _count(self, gradients: Sequence[Tensor | None]) -> tuple[list[Row], list[int]]:
        """Count the step; hyperparameters of each group at each number of steps, and which are each parameter's."""
        active = [g is not None for g in gradients]
        if all(active):
            self._steps += 1
        else:
            self._steps += torch.tensor(active, dtype=self._steps.dtype)
        groups = self.optimizer.param_groups
        first, last = (int(end) for end in self._steps.aminmax())
        if first == last:
            return [row_of(group, first) for group in groups], self._group_of
        rows: dict[tuple[int, int], int] = {}
        rows_of = []
        for number, step in zip(self._group_of, self._steps.tolist(), strict=True):
            # one that never stepped has no gradient, and nothing is computed with its row
            rows_of.append(rows.setdefault((number, max(int(step), 1)), len(rows)))
        return [row_of(groups[number], step) for number, step in rows], rows_of

    # -- what is where -------------------------------------------------------------------------------------------------

    def _gather(self) -> tuple[list[Tensor | None], np.ndarray]:
        """This rank's part of each gradient, and its address, 0 for none; with everything else up to date."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [
            None if (g := p.grad) is None else g._local_tensor if type(g) is DTensor else g for p in parameters
        ]
        if not self._is_current(parameters, gradients):
            self._read(parameters, gradients)
        addresses = [0 if g is None else g.data_ptr() for g in gradients]
        if self.kernel:
            for i, gradient in enumerate(gradients):
                if gradient is not None and (i in self._turned or not gradient.is_contiguous()):
                    self._lay_out(i, gradients, addresses)
        return gradients, np.array(addresses, np.int64)

    def _lay_out(self, number: int, gradients: list[Any], addresses: list[int]) -> None:
        """Give a gradient the order that its parameter has in memory, if it has another."""
        parameter = self._parameters[number]
        own = local(parameter)
        if alike((own, gradients[number])):
            return
        laid = torch.empty_like(own, dtype=gradients[number].dtype).copy_(gradients[number])
        if gradients[number] is parameter.grad:
            parameter.grad = laid
        gradients[number], addresses[number] = laid, laid.data_ptr()

    def _is_current(self, parameters: list[Any], gradients: list[Any]) -> bool:
        own = self._parameters
        if len(parameters) != len(own) or self._state is not self.optimizer.state:
            return False
        if not all(a is b for a, b in zip(parameters, own, strict=True)):
            return False
        first, second = self._moments
        held = self._state.get
        for i, state in enumerate(self._states):
            if not state:
                if gradients[i] is not None:
                    return False
            elif held(own[i]) is not state or state["exp_avg"] is not first[i] or state["exp_avg_sq"] is not second[i]:
                return False
        addresses = [(p._local_tensor if type(p) is DTensor else p).data_ptr() for p in parameters]
        return np.array_equal(addresses, self._known)

    def _read(self, parameters: list[Any], gradients: list[Any]) -> None:
        """Make what is missing of the state, and note where everything is."""
        optimizer = self.optimizer
        self._parameters, self._state = parameters, optimizer.state
        steps = torch.zeros(len(parameters), dtype=torch.float32, device="cpu")  # whatever the defaults are
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            state = optimizer.state[parameter] if parameter in optimizer.state or gradient is not None else {}
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
            if gradient is not None and not state:
                dtype = self.state_dtype or parameter.dtype
                state["step"] = steps[i]
                for name in MOMENTS:
                    state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        self._states = [optimizer.state.get(p, {}) for p in parameters]
        for i, state in enumerate(self._states):
            if state:
                steps[i] = float(state["step"])
                state["step"] = steps[i]
                for name in MOMENTS:
                    if not alike((local(parameters[i]), local(state[name]))):  # files hold the usual order
                        state[name] = torch.empty_like(parameters[i], dtype=state[name].dtype).copy_(state[name])
        self._steps = steps
        self._group_of = [n for n, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._moments = [[state.get(name) for state in self._states] for name in MOMENTS]
        self._turned = {i for i, p in enumerate(parameters) if not local(p).is_contiguous()}
        self._known = np.array([local(p).data_ptr() for p in parameters], np.int64)
        self._keys = [noise_key(p, i) for i, p in enumerate(parameters)]
        self._arrange()

    def _arrange(self) -> None:
        """Group what one launch can take."""
        groups: dict[tuple[Place, bool], list[int]] = {}
        for i, parameter in enumerate(self._parameters):
            if not self._states[i]:
                continue
            parts = [local(parameter), *(local(moments[i]) for moments in self._moments)]
            own_dtype = getattr(parameter, "grad_dtype", parameter.dtype) == parameter.dtype
            fits = self.kernel and own_dtype and alike(parts)
            groups.setdefault((place_of(parameter), fits), []).append(i)
        self._places = []
        for (place, fits), numbers in groups.items():
            tables = None
            if fits:
                from lightning_liger.optim.tables import Tables

                held = [[local(listed[i]) for i in numbers] for listed in (self._parameters, *self._moments)]
                tables = Tables(held[0], held[1], held[2], [self._keys[i] for i in numbers])
            self._places.append((place, numbers, tables))

    # -- in place of the optimizer's own -------------------------------------------------------------------------------

    def _as_step(self, optimizer: Optimizer) -> Any:
        """A ``step`` with the optimizer's hooks, which schedulers take for one that they have wrapped."""
        owner = self._optimizer

        def plain(_: Optimizer, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.update()
            return loss

        hooked = Optimizer.profile_hook_step(plain)

        @functools.wraps(type(optimizer).step)
        def step(*args: Any, **kwargs: Any) -> Any:
            stepping: Any = owner()
            stepping._opt_called = True
            return hooked(stepping, *args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step
