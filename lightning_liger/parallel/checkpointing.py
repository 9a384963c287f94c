"""How a Lightning strategy saves and loads sharded modules: a mixin for the strategies of both Lightning trees."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_liger.parallel import averaging, checkpoint, files, host, huggingface, optimizer_states, single
from lightning_liger.parallel.background import BackgroundSave
from lightning_liger.parallel.checkpoint import StateDictType
from lightning_liger.parallel.directories import load_directories
from lightning_liger.parallel.export import save_hf
from lightning_liger.parallel.pieces import accept_whole_tensors
from lightning_liger.parallel.together import is_first, together

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object


class Checkpointing(_Base):
    """Lightning's checkpoint hooks for a module in pieces.

    A checkpoint travels through Lightning and the user's hooks with its tensors in pieces, which costs no memory; they
    become one file or a directory when it is written.

    Args:
        state_dict_type: ``"full"``: an ordinary checkpoint file, which any Trainer and ``load_from_checkpoint`` read;
            rank 0 needs host memory for all of it (12 bytes a parameter with Adam). ``"sharded"``: a directory that every
            rank writes its part of.
        async_save: Copy to host memory and write while training goes on.
        exclude_frozen_parameters: Leave parameters that do not train out of checkpoints, such as the base of adapters.
    """

    tree: str
    _state_dict_type: StateDictType = "full"
    _exclude_frozen: bool = False
    _async_save: bool = False

    def init_checkpointing(self, state_dict_type: str, async_save: bool, exclude_frozen_parameters: bool) -> None:
        """Take the options.

        Raises:
            ValueError: for one that does not exist.
        """
        checkpoint.check_state_dict_type(state_dict_type)
        self._state_dict_type = state_dict_type  # type: ignore[assignment]
        self._async_save = async_save
        self._exclude_frozen = exclude_frozen_parameters
        self._saves = BackgroundSave()

    # -- before training ---------------------------------------------------------------------------------------------

    def check_checkpointing(self, trainer: Any) -> None:
        """Raise for callbacks and plugins that cannot work, before anything is sharded.

        Raises:
            ValueError: naming them and the remedy.
        """
        load_directories(type(self).tree)
        if trainer.state.fn == "fit":
            averaging.refuse_what_cannot_work(trainer.callbacks)
        own_io = self._own_io()
        if self._state_dict_type == "sharded" and own_io is not None:
            raise ValueError(
                f"state_dict_type='sharded' writes through torch.distributed.checkpoint and would not use"
                f" {type(own_io).__name__}. Use state_dict_type='full', or drop the plugin"
                " (async_save=True writes in the background)."
            )

    def prepare_checkpointing(self, trainer: Any, module: nn.Module) -> None:
        """The module is sharded: let whole tensors be loaded, and cut the copies that callbacks hold."""
        accept_whole_tensors(module)
        averaging.shard_averages(trainer.callbacks, module)
        if self._state_dict_type == "full" and trainer.state.fn == "fit" and is_first():
            _warn_of_host_memory(single.expected_bytes(module))

    # -- saving ------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict()`` with tensors in pieces."""
        return checkpoint.module_state(self._module, self._exclude_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with tensors in pieces."""
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state

    def save_checkpoint(self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint_``; on return it is whole, or being written in the background.

        Raises:
            RuntimeError: on every rank, when writing failed on one, or the background save before it did.
            ValueError: a directory at a remote address.
        """
        saved = dict(checkpoint_)
        saved[huggingface.KEY] = huggingface.describe(self._module)
        if self._exclude_frozen:
            saved[checkpoint.FROZEN_LEFT_OUT] = True
        path = str(self.broadcast(str(filepath)))
        background = self._saves if self._async_save else None
        self._saves.wait()
        if "://" in path or self._own_io() is not None or storage_options is not None:
            self._save_elsewhere(saved, path, storage_options)
            return
        optimizers = self.optimizers if "optimizer_states" in saved else []
        checkpoint.save(saved, Path(path), self._state_dict_type, self._module, optimizers, background)

    def _save_elsewhere(self, saved: dict[str, Any], path: str, storage_options: Any) -> None:
        if self._state_dict_type == "sharded":
            raise ValueError(f"state_dict_type='sharded' needs a file system path, not {path}. Use 'full' there.")
        whole = single.assemble(saved, Path(tempfile.gettempdir()))

        def write() -> None:
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

        first = is_first()
        if not self._async_save:
            together(write if first else None, f"Saving {path}")
            return
        group = self._saves.group
        self._saves.start(lambda: together(write if first else None, f"Saving {path}", group))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory, once a newer checkpoint that is being written is whole."""

        def remove() -> None:
            if not is_first():
                return
            if "://" in str(filepath) or self._own_io() is not None:
                self.checkpoint_io.remove_checkpoint(filepath)
            else:
                files.discard(Path(filepath))

        self._saves.afterwards(remove)

    def save_hf(
        self,
        path: str | Path,
        model: str | None = None,
        dtype: torch.dtype | str | None = None,
        tokenizer: Any = None,
        max_shard_size: str = "5GB",
    ) -> None:
        """Write the Hugging Face model that is being trained; see :func:`lightning_liger.parallel.export.save_hf`."""
        trainer = self._module.trainer
        kept = tokenizer or huggingface.find_tokenizer(self._module, getattr(trainer, "datamodule", None))
        save_hf(self._module, path, model, dtype, kept, max_shard_size)

    def teardown(self) -> None:
        """Finish what is being written.

        Raises:
            RuntimeError: the last background save failed.
        """
        try:
            self._saves.wait()
        finally:
            super().teardown()

    # -- loading -----------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: each rank reads its own pieces, once it knows which they are."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: optimizer state goes the way of every ordinary checkpoint."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint, of whole tensors that are still in the file or of pieces.

        One without optimizer state starts a new training from its weights, and says so.
        """
        self._saves.wait()
        path = str(self.broadcast(str(checkpoint_path)))
        fitting = self._module.trainer.state.fn == "fit"  # type: ignore[union-attr]
        weights_only = _asked_of_trainer() if weights_only is None else weights_only
        if "://" in path or self._own_io() is not None:
            found = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        else:
            found = checkpoint.load(Path(path), self._module, fitting, weights_only)
        if fitting and "optimizer_states" not in found:
            rank_zero_warn(
                f"{path} holds weights only (save_weights_only=True): training starts from them at step 0, with new"
                " optimizers and LR schedulers."
            )
            found.pop("loops", None)
            found.update(optimizer_states=[], lr_schedulers=[])
        return found

    def load_model_state_dict(self, checkpoint_: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of ``checkpoint_`` into the sharded module."""
        checkpoint.load_module(self._module, checkpoint_, strict)

    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        """Load the optimizer states of ``checkpoint_``.

        Raises:
            ValueError: there are more or fewer of them than optimizers, or they are of other parameters.
        """
        states = checkpoint_["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint is of a run with {len(states)} optimizers, this one has {len(self.optimizers)}."
                " Configure the same optimizers, or start from the weights alone."
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer_states.load(self._module, optimizer, state)

    @property
    def _module(self) -> nn.Module:
        module = self.lightning_module
        assert module is not None
        return module

    def _own_io(self) -> Any:
        """The user's ``CheckpointIO`` plugin, if there is one."""
        io = self._checkpoint_io
        return None if io is None or type(io).__name__ == "TorchCheckpointIO" else io


def _warn_of_host_memory(needed: int) -> None:
    if not host.fits(needed):
        rank_zero_warn(
            f"One checkpoint file of this module takes about {needed / 2**30:.0f} GiB, more than the host memory that is"
            " free on rank 0: it is put together in a temporary file beside it, which doubles what is written."
            " LigerFSDPStrategy(state_dict_type='sharded') needs neither."
        )


def _asked_of_trainer() -> bool | None:
    """``weights_only`` of ``trainer.fit(...)``, which Lightning hands on to strategies that restore early only."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_run" and hasattr(frame.f_locals.get("self"), "strategy"):
            asked: bool | None = frame.f_locals.get("weights_only")
            return asked
    return None
