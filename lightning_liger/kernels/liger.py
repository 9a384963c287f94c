"""What Liger knows about an architecture: read from its own functions, without letting them change anything.

``apply_liger_kernel_to_<type>(model=…)`` rebinds names of modelling modules and methods of instances. Here it runs on a
copy of its code in which imports hand out recorders instead of modelling modules, and in which the helpers that rebind
methods only take notes. What comes back is which submodule Liger would give which op; whether that is right is for the
comparison to say.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch.nn as nn

logging.getLogger("lightning_liger.silenced").addHandler(logging.NullHandler())
logging.getLogger("lightning_liger.silenced").propagate = False

_OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "rope")


@dataclass
class Knowledge:
    """What Liger would do to one model.

    Attributes:
        ops: by submodule, the op that Liger gives it.
        rotary: names of rotary functions in modelling modules that Liger replaces, ``"modeling_llama.apply_…"``.
        options: the ops among Liger's switches for this type.
        error: what Liger raised on this instance, or ``""``; notes taken before that are kept.
    """

    ops: dict[nn.Module, str] = field(default_factory=dict)
    rotary: set[str] = field(default_factory=set)
    options: tuple[str, ...] = ()
    error: str = ""


class _Recorder(ModuleType):
    """Looks like a module; what is set on it stays on it, and is written down."""

    def __init__(self, real: ModuleType, notes: Knowledge) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__["_notes"] = notes

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_real"], name)
        if isinstance(value, ModuleType):  # modeling_x.nn.LayerNorm = …
            return _Recorder(value, self.__dict__["_notes"])
        if isinstance(value, dict) or type(value).__name__ == "ClassInstantier":
            return dict(value)  # modeling_x.ACT2FN["relu2"] = …
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if "rotary" in name or "rope" in name:
            self.__dict__["_notes"].rotary.add(f"{self.__name__.rpartition('.')[2]}.{name}")


def _sandbox(notes: Knowledge) -> dict[str, Any]:
    """The globals of Liger's patching module, with every function rebuilt over this very dict."""
    from liger_kernel.transformers import monkey_patch

    scope: dict[str, Any] = dict(vars(monkey_patch))

    def note(op: str) -> Any:
        def take(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if isinstance(module, nn.Module):
                notes.ops[_unwrapped(module)] = op

        return take

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.startswith("liger_kernel.transformers.model."):
            return _Anything(name)  # forwards with Liger's loss: never asked for, and some cannot be imported
        found = builtins.__import__(name, globals, locals, fromlist, level)
        if name == "liger_kernel.transformers.monkey_patch":
            return _View(scope)
        # Only what is imported *from* a package is ever written to.
        return _Recorder(found, notes) if fromlist and name.startswith("transformers") else found

    replaced = {
        "_patch_rms_norm_module": note("rms_norm"),
        "_patch_muse_glimmer_scale_free_rms_norm_module": note("rms_norm"),
        "_patch_muse_glimmer_text_centered_rms_norm_module": note("rms_norm"),
        "_patch_layer_norm_module": note("layer_norm"),
        "_patch_swiglu_module": note("swiglu"),
        "_patch_geglu_module": note("geglu"),
        "logger": logging.getLogger("lightning_liger.silenced"),
        "_bind_method_to_module": lambda *args, **kwargs: None,
        "__builtins__": {**vars(builtins), "__import__": import_},
    }
    # before any function is built: a function takes its builtins, and so its imports, from its globals when it is made
    scope.update(replaced)
    for name, value in vars(monkey_patch).items():
        if isinstance(value, FunctionType) and value.__module__ == monkey_patch.__name__ and name not in replaced:
            scope[name] = FunctionType(value.__code__, scope, name, value.__defaults__, value.__closure__)
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    scope["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {k: scope.get(f.__name__, f) for k, f in table.items()}
    return scope


class _Anything(ModuleType):
    """A module of which every name can be imported."""

    def __getattr__(self, name: str) -> Any:
        return None


class _View:
    def __init__(self, scope: dict[str, Any]) -> None:
        self.__dict__ = scope


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside PEFT's wrapper of modules that are trained in full."""
    inner = getattr(module, "original_module", None)
    return inner if isinstance(inner, nn.Module) else module


@functools.cache
def model_types() -> tuple[str, ...]:
    """The architectures that Liger knows; empty without Liger or transformers."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return ()
    return tuple(MODEL_TYPE_TO_APPLY_LIGER_FN)


def knowledge(model: Any) -> Knowledge | None:
    """What Liger would do to this transformers model; None for an architecture that it does not know."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in model_types():
        return None
    notes = Knowledge()
    function = _sandbox(notes)["MODEL_TYPE_TO_APPLY_LIGER_FN"][model_type]
    parameters = inspect.signature(function).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # An op that is off by default is one that Liger's function warns about when it is asked for.
    notes.options = tuple(o for o in _OPS if (parameters[o].default is True if o in parameters else passes_on))
    wanted: dict[str, Any] = dict.fromkeys(notes.options, True)
    # These would reach beyond the notes: the loss is not ours to take from Liger, the activation is another module then.
    for name in ("cross_entropy", "fused_linear_cross_entropy", "relu_squared"):
        if name in parameters:
            wanted[name] = False
    try:
        function(**wanted, model=model)
    except Exception as error:  # layouts that Liger's function does not fit; the comparison needs no hint
        notes.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
    if "relu_squared" in parameters:
        notes.ops.update({m: "relu_squared" for m in model.modules() if type(m).__name__ == "ReLUSquaredActivation"})
    return notes
