"""Lightning's hooks, connected to the pieces; nothing else happens here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from tqdm import tqdm

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.bench.inside import attribute_first_batch
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
from lightning_liger.data.attaching import batch_by_tokens
from lightning_liger.data.batching import TokenBatches
from lightning_liger.foreign_strategies import (
    DeepSpeedSamples,
    check_clipping,
    fit_to_strategy,
    guess_batch_size,
    is_deepspeed,
)
from lightning_liger.head.pending import settle_pending
from lightning_liger.hooks import TrainingHooks
from lightning_liger.meter.meter import Meter
from lightning_liger.optim.clipping import ClippingInStep
from lightning_liger.optim.taking import take_over_plain
from lightning_liger.padding.shapes_seen import ShapesSeen
from lightning_liger.parallel import huggingface
from lightning_liger.parallel.leaving import leave_quietly
from lightning_liger.parallel.shared_batches import SharedRandomness
from lightning_liger.printing import printable
from lightning_liger.proof.hooks import proofs
from lightning_liger.report import Report
from lightning_liger.settings import Settings, check_option_names
from lightning_liger.token_weights import TokenWeights
from lightning_liger.trees import callback_bases
from lightning_liger.tuning.blocks import BlockTuning
from lightning_liger.wrapped import WrappedAttributes

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
else:
    _Base = type("_Base", callback_bases(), {})


# In the checkpoint itself: a callback with a state of its own is asked for by every Trainer that loads the file.
_TOKEN_BATCHES = "lightning_liger.token_batches"
_Init = TypeVar("_Init", bound=Callable[..., None])


def _named_options(init: _Init) -> _Init:
    """Answer a misspelt option with the right one. Not in ``__new__``: command lines would read the options there."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if args:
            raise TypeError("LigerCallback takes keyword options only, for example LigerCallback(padding_free=True).")
        check_option_names(options)
        init(self, **options)

    return cast(_Init, checked)


class LigerCallback(_Base):
    """Accelerates the module that a Trainer runs, and leaves it as it was afterwards.

    Works in ``lightning`` and ``pytorch_lightning`` Trainers, with strategies ``auto``, ``ddp``, ``liger_fsdp`` and
    ``ModelParallelStrategy``. Training, validation and testing are accelerated, prediction and ``generate`` are not.

    Args:
        padding_free: Remove padding at the model's backbone.
        fused_head: Compute the LM head together with the loss.
        head: Path of the LM head inside the module, when it is not found by itself.
        attention: ``"auto"``, ``"fa4"``, ``"fa3"``, ``"fa2"``, ``"varlen"``, ``"flex"`` or ``"sdpa"``.
        head_backend: ``"auto"``, ``"torch"``, ``"triton"`` or ``"liger"``.
        compile: ``"auto"``, True, False or ``"cudagraphs"``.
        kernels: ``"auto"``, True, False, or these by op: ``{"rope": False}``; ops left out are ``"auto"``.
        max_tokens_per_batch: Tokens per training batch, instead of a number of samples; ``"auto"``; ``"keep_samples"``.
        length_fn: Tokens of a dataset sample.
        overlong: ``"error"``, ``"truncate"``, ``"skip"`` or ``"own_batch"``.
        loss_normalization: ``"batch"`` or ``"tokens"``.
        shape_buckets: ``"auto"``, True, False, or a list of sizes in tokens.
        optimizer_state_dtype: ``"bf16"``: both moments of AdamW in bf16, rounded stochastically.
        fused_optimizer: ``"auto"``, True or False: one launch for the whole step of AdamW, clipping included.
        bf16: Refuse fp16 and fp64 ``precision=``; ``False`` accepts any.
        verify: ``"off"``, ``"warn"`` or ``"strict"``: prove that what was applied ran, and computes the same.
        profile: A directory that keeps the trace of one training step.
        benchmark_steps: Runs of the first batch per variant, to show what each feature is worth.
        verbose: Print the report after the first training step.

    See :class:`lightning_liger.Settings` for the full meaning of each option.

    Raises:
        TypeError: an option that does not exist. ValueError: a value that does not.
    """

    @_named_options
    def __init__(
        self,
        *,
        padding_free: bool = True,
        fused_head: bool = True,
        head: str | None = None,
        attention: Attention = "auto",
        head_backend: HeadBackend = "auto",
        kernels: KernelChoice = "auto",
        compile: CompileChoice = "auto",
        tiled_mlp: TiledChoice = False,
        max_tokens_per_batch: int | Budget | None = None,
        length_fn: Callable[[Any], int] | None = None,
        overlong: Overlong = "error",
        loss_normalization: LossNormalization = "batch",
        shape_buckets: bool | Auto | Sequence[int] = "auto",
        optimizer_state_dtype: OptimizerStateDtype | None = None,
        fused_optimizer: bool | Auto = "auto",
        bf16: bool = True,
        verify: Verify = "warn",
        profile: str | Path | None = None,
        benchmark_steps: int = 0,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            padding_free=padding_free,
            fused_head=fused_head,
            head=head,
            attention=attention,
            head_backend=head_backend,
            kernels=kernels,
            compile=compile,
            tiled_mlp=tiled_mlp,
            max_tokens_per_batch=max_tokens_per_batch,
            length_fn=length_fn,
            overlong=overlong,
            loss_normalization=loss_normalization,
            shape_buckets=shape_buckets,
            optimizer_state_dtype=optimizer_state_dtype,
            fused_optimizer=fused_optimizer,
            bf16=bf16,
            verify=verify,
            profile=profile,
            benchmark_steps=benchmark_steps,
            verbose=verbose,
        )
        self.report = Report()
        self._accelerated: Accelerated | None = None
        self._batches: TokenBatches | None = None
        self._hooks: list[TrainingHooks] = []
        self._wrapped = WrappedAttributes()
        self._first_batch = True

    # -- before the model is moved and wrapped ---------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        leave_quietly()
        if stage == "predict":
            return
        self._check_precision(trainer)
        if stage == "fit":
            check_clipping(trainer, pl_module)
            guess_batch_size(trainer.strategy, self._wrapped.wrap)
        # Models are born in __init__, setup or configure_model; strategy.setup is the first moment when all are there,
        # and the last before they are wrapped and sharded.
        strategy = trainer.strategy
        strategy_setup, batch_to_device = strategy.setup, strategy.batch_to_device

        def setup(trainer: Any) -> None:
            self._apply(trainer, pl_module)
            self._handle().runs.waits = stage == "fit"
            strategy_setup(trainer)
            if stage == "fit":
                chosen = self.settings
                take_over_plain(trainer, chosen.optimizer_state_dtype, chosen.fused_optimizer, self.report.optimizer)

        def to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            moved = batch_to_device(batch, *args, **kwargs)
            if self._accelerated is not None:
                self._accelerated.book.pair(batch, moved)
            return moved

        self._wrapped.wrap(strategy, "setup", setup)
        self._wrapped.wrap(strategy, "batch_to_device", to_device)
        if stage == "fit":
            self._batches = batch_by_tokens(trainer, pl_module, self.settings, self._wrapped.wrap)

    def _check_precision(self, trainer: Any) -> None:
        precision = str(getattr(trainer, "precision", "32-true"))
        if self.settings.bf16 and (precision.startswith("16") or precision.startswith("64")):
            raise ValueError(
                f"precision={precision!r} does not fit the bf16 policy that LigerCallback holds (fp32 or bf16 compute, "
                "no loss scaling). Use Trainer(precision='bf16-mixed'), 'bf16-true' or '32-true', or accept any "
                "precision with LigerCallback(bf16=False)."
            )

    def _apply(self, trainer: Any, pl_module: Any) -> None:
        settings, notes = fit_to_strategy(trainer.strategy, self.settings)
        self._accelerated = accelerate(pl_module, settings, getattr(trainer.strategy, "sequence_group", None))
        self.report = self._accelerated.report
        if self._batches is not None:
            self.report.batching = self._batches.report
            self._accelerated.buckets.budget = self._batches.report.tokens_of_most_batches
        for note in notes:
            self.report.note(note)

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.report.begin_training()
        self._hooks = [] if self._batches is None else [self._batches, DeepSpeedSamples(self._batches.report)]
        if self.settings.loss_normalization == "tokens":
            self._hooks.append(TokenWeights(self.report, self._wrapped.wrap))
        self._hooks.append(ClippingInStep(self.report.optimizer, self._wrapped.wrap))
        if self._handle().sequence is not None:
            self._hooks.append(SharedRandomness())
        self._hooks.append(ShapesSeen(self.report.padding, self._say))
        self._hooks.append(BlockTuning(lambda: self._handle().runs))
        could_compile = self.settings.padding_free and self.settings.compile is False
        self._hooks.append(Meter(self.report, self.settings.head, could_compile, self._wrapped.wrap, self._say))
        self._hooks += proofs(self.settings, self._handle, self._wrapped.wrap, self._say)
        self._first_batch = True
        for hooks in self._hooks:
            hooks.begin_training(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for hooks in self._hooks:
            hooks.begin_epoch(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._first_batch or batch_idx == 0:
            # heads that were resized, or models that were made, in a hook of the module after strategy.setup
            self._apply(trainer, pl_module)
        if self._first_batch and self.settings.benchmark_steps:
            self.on_validation_start(trainer, pl_module)  # what is measured is no part of the training's own numbers
            attribute_first_batch(self._handle(), trainer, pl_module, batch, batch_idx, self._say)
            self.on_validation_end(trainer, pl_module)
        for hooks in self._hooks:
            hooks.begin_batch(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        for hooks in self._hooks:
            hooks.before_backward(trainer, pl_module, loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for hooks in self._hooks:
            hooks.after_backward(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        settle_pending()
        for hooks in self._hooks:
            hooks.before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for hooks in self._hooks:
            hooks.end_batch(trainer, pl_module, outputs, batch, batch_idx)
        if self._first_batch:
            self._first_batch = False
            self._say(self.report.render())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        for hooks in self._hooks:
            hooks.begin_validation(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for hooks in self._hooks:
            hooks.end_validation(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for hooks in self._hooks:
            hooks.end_training(trainer, pl_module)

    def _handle(self) -> Accelerated:
        return cast(Accelerated, self._accelerated)

    @rank_zero_only
    def _say(self, text: str) -> None:
        if self.settings.verbose:
            # print() would cut a progress bar in two
            tqdm.write(printable(text))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if is_deepspeed(trainer.strategy):  # as liger_fsdp does, for exports without the user's code
            checkpoint[huggingface.KEY] = huggingface.describe(pl_module)
        if self._batches is not None:
            checkpoint[_TOKEN_BATCHES] = self._batches.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        progress = checkpoint.get(_TOKEN_BATCHES)
        if progress is not None and self._batches is not None and trainer.state.fn == "fit":
            self._batches.load_state_dict(progress)

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._revert()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._revert()

    def _revert(self) -> None:
        for hooks in self._hooks:
            hooks.close()
        self._hooks = []
        self._wrapped.restore()
        if self._accelerated is not None:
            self._accelerated.revert()
            self._accelerated = None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_accelerated=None, _batches=None, _hooks=[], _wrapped=WrappedAttributes())
        return state
