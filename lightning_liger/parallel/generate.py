"""``generate()`` on a sharded model: the same tokens, no deadlock, and no gathering for every token.

Decoding runs as many forward passes as its longest answer has tokens, which differs between ranks; a pass of a sharded
model waits for all of them. Three cases:

* The model is whole (:class:`Gathering`, through an evaluation loop when memory allows): each rank decodes by itself, also
  a rank that is alone in calling ``generate``.
* It is not, and memory allows: it is gathered for this call. Every rank has to call ``generate``; one that does not is
  found out before anything is exchanged.
* Memory does not allow: ranks decode in lock step, those that are done keep the others company (``synced_gpus`` in
  transformers). Every rank has to call ``generate``.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from lightning_liger.parallel.gathering import Gathering
from lightning_liger.patching import Rebound, Switch, live_binding

_PLACES = itertools.count()


class RanksDisagree(RuntimeError):
    """Some ranks called a method that has to be called on all of them."""


class Rendezvous:
    """Meets all ranks through the store of the process group: unlike a collective, it can be given up.

    Args:
        timeout: how long to wait for the others. Every rank makes its rendezvous in the same order.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        # what an earlier one left in the store would be taken for an arrival at this one
        self._place = f"lightning_liger/rendezvous/{next(_PLACES)}"
        self._met = 0

    def meet(self, what: str) -> None:
        """Return when every rank has called this as often.

        Raises:
            RanksDisagree: not all did within the timeout. No collective was begun.
        """
        world = dist.get_world_size()
        if world == 1:
            return
        store: Any = dist.distributed_c10d._get_default_store()
        self._met += 1
        key = f"{self._place}/{self._met}"
        store.set(f"{key}/{dist.get_rank()}", "here")
        deadline = time.monotonic() + self._timeout.total_seconds()
        for rank in range(world):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([f"{key}/{rank}"], timedelta(seconds=left))
            except (RuntimeError, dist.DistStoreError) as error:
                absent = [r for r in range(rank, world) if not store.check([f"{key}/{r}"])]
                self._met -= 1
                store.delete_key(f"{key}/{dist.get_rank()}")
                raise RanksDisagree(
                    f"rank {dist.get_rank()} waits in {what}, which ranks {absent} did not call within "
                    f"{self._timeout}. A sharded model generates on every rank or on none; inside of validation, test "
                    "and prediction single ranks may, when the model fits into memory whole "
                    "(LigerFSDPStrategy(gather_in_evaluation=True) insists on it)."
                ) from error
        if self._met > 1:  # all have left the one before
            store.delete_key(f"{self._place}/{self._met - 1}/{dist.get_rank()}")


class ShardedGenerate(Rebound):
    """``generate`` of one module, with what the ranks have to agree on around it."""

    name = "generate"

    def __init__(
        self,
        module: nn.Module,
        switch: Switch,
        gathering: Gathering,
        rendezvous: Rendezvous,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(module, switch)
        self._gathering = gathering
        self._rendezvous = rendezvous
        self._note = note

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise NotImplementedError("a sharded module cannot be copied")

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.name)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        gathering = self._gathering
        if gathering.is_whole:
            return self._decode(args, kwargs, in_step=False)
        self._rendezvous.meet(f"{type(self.module).__name__.removeprefix('FSDP')}.generate()")
        if gathering.fits():
            with gathering.whole():
                return self._decode(args, kwargs, in_step=False)
        self._note(
            f"generate() decodes in lock step on all ranks: {gathering.bytes() / 2**30:.1f} GiB of whole parameters do "
            "not fit beside what is in memory"
        )
        return self._decode(args, kwargs, in_step=dist.get_world_size() > 1)

    def _decode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_step: bool) -> Any:
        # transformers sees that FSDP manages the model, and by itself would always let ranks wait for each other
        if "synced_gpus" in inspect.signature(getattr(type(self.module), self.name)).parameters:
            kwargs["synced_gpus"] = in_step
        if in_step and not self._caches(kwargs):
            # a rank that is done goes on with others: without a cache, transformers gives it masks that are too long
            self._note("generate() decodes with a KV cache, so that ranks can wait for each other (use_cache=False)")
            kwargs["use_cache"] = True
        with self._gathering.forgotten():
            return self.original(*args, **kwargs)

    def _caches(self, kwargs: dict[str, Any]) -> bool:
        module: Any = self.module
        configs: list[Any] = [kwargs.get("generation_config"), getattr(module, "generation_config", None)]
        said = [kwargs.get("use_cache"), *(getattr(config, "use_cache", None) for config in configs)]
        return next((answer for answer in said if answer is not None), True)


def sharded_generate(
    module: nn.Module, switch: Switch, gathering: Gathering, rendezvous: Rendezvous, note: Callable[[str], None]
) -> list[ShardedGenerate]:
    """Bind :class:`ShardedGenerate` to every submodule with a ``generate`` method.

    Returns:
        the bindings that are new.
    """
    made = []
    for inner in module.modules():
        if not callable(getattr(type(inner), "generate", None)):
            continue
        if live_binding(inner, "generate", switch, ShardedGenerate) is None:
            binding = ShardedGenerate(inner, switch, gathering, rendezvous, note)
            binding.bind()
            made.append(binding)
    return made
