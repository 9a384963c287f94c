"""The padded run of a decoder call whose padding was removed, for whoever looks at padded positions afterwards."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_liger.head.lazy import LazyRows
from lightning_liger.padding.backends.errors import PackingError
from lightning_liger.padding.layout import Layout
from lightning_liger.padding.plain import PlainRun
from lightning_liger.padding.plain_decoder.ragged import Packing, RaggedTensor, Unpackable, rows_of

if TYPE_CHECKING:
    from lightning_liger.padding.plain_decoder.decoder import PackedDecoder


class Attribute(str):
    """A step of a path that is an attribute, not an item."""


_HEAD, _OUTPUT, _INSIDE = "head", "output", "inside"


class DecoderRun(PlainRun):
    """One call of a decoder without padding, and where padded values come from.

    While the decoder runs, nobody may read them: :class:`Unpackable` is raised, and the call is made again as it was
    written. Afterwards they are those of a second, padded run.
    """

    def __init__(
        self, decoder: PackedDecoder, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout, backend: str
    ) -> None:
        super().__init__(decoder, args, kwargs, layout)
        self.packing = Packing(layout, backend, decoder.report)
        self.active = True
        self.embedded = False
        self._calls: Counter[nn.Module] = Counter()
        self._captured: dict[tuple[nn.Module, int], Tensor] = {}

    # -- from ragged to lazy ---------------------------------------------------------------------------------------

    def at_head(self, head: nn.Module, hidden: RaggedTensor) -> LazyRows:
        """What a head is given in place of ragged hidden states."""
        self._calls[head] += 1
        return self._lazy(hidden, (_HEAD, head, self._calls[head]))

    def in_output(self, value: RaggedTensor, path: tuple[Any, ...]) -> LazyRows:
        return self._lazy(value, (_OUTPUT, *path))

    def outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func``, which is not known to work on single tokens, on tensors that compute what it reads."""
        try:
            args, kwargs = tree_map_only(RaggedTensor, lambda t: self._lazy(t, (_INSIDE,)), (args, kwargs))
        except Unpackable as reason:
            raise Unpackable(f"{getattr(func, '__name__', func)} is not known token by token ({reason})") from None
        return func(*args, **kwargs)

    def _lazy(self, tensor: RaggedTensor, path: tuple[Any, ...]) -> LazyRows:
        rows = rows_of(tensor)
        if rows.dim() != 2 or (tensor.batch, tensor.seq) not in ((0, 1), (0, 0)):
            raise Unpackable(f"tokens of shape {tuple(tensor.shape)} are used as a whole")
        index = self._layout.on(rows.device).index
        if tensor.batch == tensor.seq:
            index = index.reshape(-1)
        self.returned(path, rows)
        return LazyRows.hidden(rows, index, has_pads=self._layout.has_padding, plain=self, path=path)

    # -- padded values -----------------------------------------------------------------------------------------------

    def value(self, path: tuple[Any, ...]) -> Tensor:
        self._check("a reader", path)
        if (standing_in := self.stand_in(path)) is not None:
            return standing_in
        found = self.output()
        if path[0] == _HEAD:
            return self._captured[path[1], path[2]]
        for step in path[1:]:
            found = getattr(found, step) if isinstance(step, Attribute) else found[step]
        value: Tensor = found
        return value

    def scored(self, what: str) -> None:
        self._check(what)
        super().scored(what)

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        self._check(what, path)
        return super().read(path, what, differentiable)

    def output(self) -> Any:
        seen: Counter[nn.Module] = Counter()

        def capture(head: nn.Module, args: tuple[Any, ...]) -> None:
            seen[head] += 1
            self._captured[head, seen[head]] = args[0]

        handles = [head.register_forward_pre_hook(capture) for head in self._calls]
        try:
            return super().output()
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, what: str, path: tuple[Any, ...] = ()) -> None:
        if self.active:
            raise Unpackable(f"{what} reads padded positions")
        if path[:1] == (_INSIDE,):
            raise PackingError(
                f"{what} reads padded positions of a tensor that {type(self.backbone.module).__name__} has kept from "
                "its forward. Padding removal did not compute them: set padding_free=False."
            )
