"""Lightning's hooks, connected to the pieces; nothing else happens here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from tqdm import tqdm

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.data.attaching import batch_by_tokens
from lightning_liger.data.batching import TokenBatches
from lightning_liger.foreign_strategies import check_clipping, fit_to_strategy
from lightning_liger.head.pending import settle_pending
from lightning_liger.meter import Meter
from lightning_liger.report import Report, printable
from lightning_liger.settings import Settings, check_option_names
from lightning_liger.token_weights import TokenWeights, check_weighable
from lightning_liger.trees import callback_bases

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
        head_backend: ``"auto"``, ``"torch"`` or ``"liger"``.
        kernels: ``"auto"``, True, False, or these by op: ``{"rope": False}``; ops left out are ``"auto"``.
        max_tokens_per_batch: Tokens per training batch, instead of a number of samples; ``"auto"``; ``"keep_samples"``.
        length_fn: Tokens of a dataset sample.
        overlong: ``"error"``, ``"truncate"``, ``"skip"`` or ``"own_batch"``.
        loss_normalization: ``"batch"`` or ``"tokens"``.
        bf16: Refuse fp16 and fp64 ``precision=``; ``False`` accepts any.
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
        attention: str = "auto",
        head_backend: str = "auto",
        kernels: bool | str | Mapping[str, bool | str] = "auto",
        max_tokens_per_batch: int | str | None = None,
        length_fn: Callable[[Any], int] | None = None,
        overlong: str = "error",
        loss_normalization: str = "batch",
        bf16: bool = True,
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
            max_tokens_per_batch=max_tokens_per_batch,
            length_fn=length_fn,
            overlong=overlong,
            loss_normalization=loss_normalization,
            bf16=bf16,
            verbose=verbose,
        )
        self.report = Report()
        self._accelerated: Accelerated | None = None
        self._meter: Meter | None = None
        self._batches: TokenBatches | None = None
        self._weights: TokenWeights | None = None
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._first_batch = True
        self._logged = False

    # -- before the model is moved and wrapped ---------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "predict":
            return
        self._check_precision(trainer)
        if stage == "fit":
            check_clipping(trainer, pl_module)
        # Models are born in __init__, setup or configure_model; strategy.setup is the first moment when all are there,
        # and the last before they are wrapped and sharded.
        strategy = trainer.strategy
        strategy_setup, batch_to_device = strategy.setup, strategy.batch_to_device

        def setup(trainer: Any) -> None:
            self._apply(trainer, pl_module)
            strategy_setup(trainer)

        def to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            moved = batch_to_device(batch, *args, **kwargs)
            if self._accelerated is not None:
                self._accelerated.book.pair(batch, moved)
            return moved

        self._wrap(strategy, "setup", setup)
        self._wrap(strategy, "batch_to_device", to_device)
        if stage == "fit":
            self._batches = batch_by_tokens(trainer, pl_module, self.settings, self._wrap)

    def _weigh_tokens(self, trainer: Any) -> None:
        check_weighable(trainer)
        self._weights = weights = TokenWeights()
        plugin = trainer.precision_plugin
        clip_gradients = plugin.clip_gradients

        def clip(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            # under manual optimization the user clips before the step that would weigh
            weights.before_step(optimizer, trainer)
            clip_gradients(optimizer, *args, **kwargs)

        self._wrap(plugin, "clip_gradients", clip)

    def _wrap(self, owner: Any, name: str, replacement: Any) -> None:
        self._wrapped.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

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
        self._accelerated = accelerate(pl_module, settings)
        self.report = self._accelerated.report
        if self._batches is not None:
            self.report.batching = self._batches.report
        for note in notes:
            self.report.note(note)

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.report.begin_training()
        if self._batches is not None:
            self._batches.begin_training(trainer)
        if self.settings.loss_normalization == "tokens":
            self._weigh_tokens(trainer)
        self._meter = Meter(self.report.padding)
        self._first_batch = True
        self._logged = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._batches is not None:
            self._batches.begin_epoch(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._first_batch or batch_idx == 0:
            # heads that were resized, or models that were made, in a hook of the module after strategy.setup
            self._apply(trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._weights is not None:
            self._weights.before_backward(loss, trainer.strategy.root_device)
            if self._weights.off:
                self.report.note(f"loss_normalization='tokens': {self._weights.off}")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        settle_pending()
        if self._weights is not None:
            self._weights.before_step(optimizer, trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._batches is not None:
            self._batches.end_batch(trainer)
        if self._first_batch:
            self._first_batch = False
            self._show(trainer)
        if self._meter is not None and _loggers_listen(trainer):
            metrics = self._meter.read(pl_module.device, trainer.strategy)
            self.report.metrics.update(metrics)
            self._logged = True
            if trainer.barebones:
                return  # it logs nothing, and says so at every call
            for name, value in metrics.items():
                bar = not name.endswith("peak_memory_gb")
                # on the CPU: a number made on the device would wait for it
                pl_module.log(name, torch.tensor(value), prog_bar=bar, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._meter is None:
            return
        metrics = self._meter.overall(pl_module.device, trainer.strategy)
        self.report.metrics.update(metrics)
        if not self._logged and not trainer.fast_dev_run:
            # a training shorter than log_every_n_steps would leave no trace of it
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    @rank_zero_only
    def _show(self, trainer: Any) -> None:
        if self.settings.verbose:
            # print() would cut a progress bar in two
            tqdm.write(printable(self.report.render()))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._meter is not None:
            self._meter.resume()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
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
        for owner, name, before in reversed(self._wrapped):
            if before is None:
                owner.__dict__.pop(name, None)
            else:
                setattr(owner, name, before)
        self._wrapped.clear()
        if self._accelerated is not None:
            self._accelerated.revert()
            self._accelerated = None
        self._meter = None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_accelerated=None, _meter=None, _batches=None, _wrapped=[])
        return state


def _loggers_listen(trainer: Any) -> bool:
    """Whether Lightning hands this batch's metrics to the loggers: the last micro-batch of every n-th step.

    What is logged in any other batch is dropped. Batches that stepped are counted over epochs, so that an epoch
    shorter than ``log_every_n_steps`` is no reason for silence.
    """
    every = trainer.log_every_n_steps
    loop = trainer.fit_loop.epoch_loop
    return every > 0 and (loop._batches_that_stepped + 1) % every == 0 and not loop._should_accumulate()
