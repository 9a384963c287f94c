"""Every option, its default and its meaning, in one frozen dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from lightning_liger.choices import (
    Attention,
    Auto,
    Budget,
    CompileChoice,
    HeadBackend,
    KernelChoice,
    LossNormalization,
    OptimizerStateDtype,
    Overlong,
    TiledChoice,
    Verify,
)
from lightning_liger.kernels.options import check_choice


@dataclass(frozen=True)
class Settings:
    """What :func:`lightning_liger.accelerate` and :class:`lightning_liger.LigerCallback` do.

    Args:
        padding_free: Remove padding at the model's backbone: the decoder stack sees ``(1, T)`` real tokens, the user's
            code keeps seeing ``(B, S)``. Only where a probe shows that the result is the same.
        fused_head: Compute the LM head together with the loss, in chunks and only for the rows whose label counts, so
            that the ``(B, S, V)`` logits are never stored. Any other use of the logits computes them as usual.
        head: Path of the LM head inside the module (``"model.lm_head"``) when it is not found by itself; an
            ``nn.Linear`` whose output rows are vocabulary entries.
        attention: How packed documents attend. ``"fa4"``, ``"fa3"``, ``"fa2"``: the FlashAttention packages;
            ``"varlen"``: the FlashAttention 2 inside of torch (these four: CUDA, fp16/bf16); ``"flex"``: compiled
            FlexAttention (CUDA); ``"sdpa"``: the model's own attention, once per document; ``"auto"``: by device,
            dtype, length of the documents and what the model's layers ask for. See docs/attention.md.
        head_backend: ``"torch"``: chunked PyTorch, any device; ``"triton"``: the same chunks with one kernel for
            softmax and gradient, CUDA; ``"liger"``: Liger's fused linear cross entropy, CUDA; ``"auto"`` picks by
            device.
        kernels: Triton kernels for single modules (RMSNorm, LayerNorm, gated MLPs and experts, rotary embeddings, squared
            ReLU), wherever a comparison shows that they compute the same. ``"auto"``: on a CUDA device, where timing
            shows that they are worth it, or, where nothing can be timed, for models of hidden size 2048 and up; ``True``: wherever Triton runs; ``False``: never. A mapping decides op by op, with
            the same three values: ``{"rms_norm": True, "rope": False}``; an op that it leaves out is ``"auto"``.
        compile: How decoder blocks run whose padding is removed. True: compiled, once for all layers; ``"cudagraphs"``:
            compiled and replayed as CUDA graphs; False: as they are; ``"auto"``: on a CUDA device, what is fastest on
            the first batch and fits into memory. See docs/speed.md.
        tiled_mlp: Compute the MLPs of decoder blocks in chunks of tokens, and again chunk by chunk in backward, so that what
            lies between an MLP's input and output exists for one chunk only. A number is the size of a chunk in tokens,
            True 8192 of them; ``"auto"``: in calls of 32768 tokens and more, where blocks are recomputed in backward
            anyway (activation checkpointing), so that it costs no further forward. See docs/long-documents.md.
        max_tokens_per_batch: Fill training batches up to this many tokens instead of a fixed number of samples: every
            rank gets as many batches, each full and of like cost within a step. ``"auto"``: the largest number that
            fits into the device's memory. ``"keep_samples"``: steps hold as many samples, on average, as the loader's
            own, in batches of like cost. None keeps the loader's batches.
        length_fn: Tokens of a dataset sample, when ``max_tokens_per_batch`` cannot find them by itself.
        overlong: What becomes of samples of more than ``max_tokens_per_batch`` tokens: ``"error"``, ``"truncate"``,
            ``"skip"`` or ``"own_batch"``.
        loss_normalization: ``"batch"``: Lightning's arithmetic, the mean over ranks and accumulated micro-batches of
            each one's mean loss. ``"tokens"``: the mean over all their labels, as one big batch would have it.
        shape_buckets: Lengthen packed batches with filler, which nobody reads, to one of a few shapes, so that compiled
            layers and CUDA graphs are made once and not for every batch. ``"auto"``: where decoder layers are compiled;
            True: wherever padding is removed; False: never; a list of sizes in tokens, such as ``[4096, 8192, 16384]``:
            the next of these (beyond the largest: multiples of it).
        optimizer_state_dtype: ``"bf16"`` keeps both moments of ``torch.optim.AdamW`` and ``Adam`` in bf16, rounded
            stochastically, beside weights in whatever dtype they have: 4 bytes a parameter instead of 8. None leaves the
            state as the optimizer makes it. See docs/optimizers.md.
        fused_optimizer: One launch for the whole step of ``AdamW`` and ``Adam``, clipping by norm included. ``"auto"``: on a
            CUDA device, for fp32 parameters, where the optimizer's author left the implementation open (neither
            ``foreach`` nor ``fused`` given); True: also where they chose one; False: the optimizer's own step.
        bf16: Hold the bf16 policy: parameters and optimizer state stay fp32 (or bf16 by the user's choice), compute is
            fp32 or bf16, and loss-scaled fp16 or fp64 precision is an error. ``False`` accepts any ``precision=``.
        verify: Prove that what was applied ran in an early training step, and that the first batch's loss and gradients
            are those of a plain run. ``"warn"`` says what did not run and switches off what computes something else;
            ``"strict"`` ends the training there; ``"off"`` asks nothing.
        profile: A directory that keeps the trace of the third training step, for TensorBoard, Perfetto or
            ``chrome://tracing``, with a range for every module (NVTX ranges too, on CUDA). None keeps nothing.
        benchmark_steps: Before the first training step, run forward and backward of its batch this many times plain and
            with one feature more at a time, and show what each is worth. Nothing of the training changes. 0: do not.
        verbose: Print the report after the first training step.

    Raises:
        ValueError: for a value outside of what is listed here.
    """

    padding_free: bool = True
    fused_head: bool = True
    head: str | None = None
    attention: Attention = "auto"
    head_backend: HeadBackend = "auto"
    kernels: KernelChoice = "auto"
    compile: CompileChoice = "auto"
    tiled_mlp: TiledChoice = False
    max_tokens_per_batch: int | Budget | None = None
    length_fn: Callable[[Any], int] | None = None
    overlong: Overlong = "error"
    loss_normalization: LossNormalization = "batch"
    shape_buckets: bool | Auto | Sequence[int] = "auto"
    optimizer_state_dtype: OptimizerStateDtype | None = None
    fused_optimizer: bool | Auto = "auto"
    bf16: bool = True
    verify: Verify = "warn"
    profile: str | Path | None = None
    benchmark_steps: int = 0
    verbose: bool = True

    def __post_init__(self) -> None:
        for name in ("padding_free", "fused_head", "bf16", "verbose"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected True or False.")
        _one_of("attention", self.attention, get_args(Attention))
        _one_of("head_backend", self.head_backend, get_args(HeadBackend))
        check_choice(self.kernels)
        if not isinstance(self.compile, bool):
            _one_of("compile", self.compile, ("auto", "cudagraphs"))
        if self.compile in (True, "cudagraphs") and not self.padding_free:
            raise ValueError(f"compile={self.compile!r} is about batches without padding, but padding_free=False.")
        tiled = self.tiled_mlp
        if not isinstance(tiled, bool) and tiled != "auto" and (not isinstance(tiled, int) or tiled < 1):
            raise ValueError(
                f"tiled_mlp={tiled!r}: expected True, False, 'auto' or the tokens of a chunk, such as 8192."
            )
        _one_of("loss_normalization", self.loss_normalization, get_args(LossNormalization))
        if self.loss_normalization == "tokens" and not self.fused_head:
            raise ValueError("loss_normalization='tokens' counts labels in the fused head, but fused_head=False.")
        object.__setattr__(self, "shape_buckets", _sizes(self.shape_buckets))
        if self.shape_buckets not in (False, "auto") and not self.padding_free:
            raise ValueError("shape_buckets=... is about batches without padding, but padding_free=False.")
        check_state_dtype(self.optimizer_state_dtype)
        if not isinstance(self.fused_optimizer, bool):
            _one_of("fused_optimizer", self.fused_optimizer, ("auto",))
        if self.fused_optimizer is False and self.optimizer_state_dtype is not None:
            raise ValueError(
                "optimizer_state_dtype=... steps for the optimizer, but fused_optimizer=False forbids that."
            )
        _one_of("verify", self.verify, get_args(Verify))
        if self.profile is not None and (not isinstance(self.profile, (str, Path)) or not str(self.profile)):
            raise ValueError(f"profile={self.profile!r}: expected a directory for the trace of one training step.")
        steps = self.benchmark_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"benchmark_steps={steps!r}: expected how often to run each variant, such as 5, or 0.")
        _one_of("overlong", self.overlong, get_args(Overlong))
        budget = self.max_tokens_per_batch
        named = (None, *get_args(Budget))
        if budget not in named and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
            raise ValueError(
                f"max_tokens_per_batch={budget!r}: expected a positive number of tokens, such as 16384, 'auto' or "
                "'keep_samples'."
            )
        if self.length_fn is not None and not callable(self.length_fn):
            raise ValueError(f"length_fn={self.length_fn!r}: expected a function from a dataset sample to its tokens.")
        for name, default in (("length_fn", None), ("overlong", "error")):
            if budget is None and getattr(self, name) != default:
                raise ValueError(f"{name}=... is about batches by tokens, but max_tokens_per_batch is not given.")
        if isinstance(budget, str) and self.overlong != "error":
            raise ValueError(
                f"overlong={self.overlong!r} is about samples over a given number of tokens, and "
                f"max_tokens_per_batch={budget!r} finds a number that every sample fits into."
            )
        if self.head is not None and (not isinstance(self.head, str) or not self.head):
            raise ValueError(
                f"head={self.head!r}: expected the path of an nn.Linear inside the module, such as 'model.lm_head'."
            )
        if self.head is not None and not self.fused_head:
            raise ValueError("head=... names a head to fuse, but fused_head=False. Drop one of the two.")


def _sizes(choice: Any) -> Any:
    """The ``shape_buckets`` option, a list as an ascending tuple."""
    if isinstance(choice, bool) or choice == "auto":
        return choice
    numbers = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else ()
    if numbers and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        return tuple(sorted(set(numbers)))
    raise ValueError(
        f"shape_buckets={choice!r}: expected True, False, 'auto' or a list of sizes in tokens, such as [4096, 8192]."
    )


def check_state_dtype(value: object) -> None:
    """Raise ``ValueError`` for an ``optimizer_state_dtype`` that does not exist."""
    if value is not None and value not in get_args(OptimizerStateDtype):
        raise ValueError(f"optimizer_state_dtype={value!r}: expected 'bf16', or None for the optimizer's own.")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


# as other libraries call it
_OF_THE_STRATEGY = (
    *("sequence_parallel_size", "ulysses_sequence_parallel_size", "context_parallel_size", "sp_size", "cp_size"),
    *("sequence_parallel", "context_parallel"),
)


def check_option_names(given: dict[str, Any]) -> None:
    """Raise one clear error for option names that do not exist.

    Raises:
        TypeError: naming the unknown option, the nearest known one and all that are valid.
    """
    valid = [f.name for f in fields(Settings)]
    for name in given:
        if name in _OF_THE_STRATEGY:
            raise TypeError(
                f"{name!r} is about ranks, which the strategy arranges: "
                "Trainer(strategy=LigerFSDPStrategy(sequence_parallel_size=2)), beside LigerCallback()."
            )
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Unknown option {name!r}.{hint} Valid options: {', '.join(valid)}.")
