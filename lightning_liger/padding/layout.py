"""Where the real tokens of a padded batch are.

A :class:`Layout` is made on the CPU, from the attention mask as the DataLoader produced it. :class:`LayoutBook` keeps
it beside the batch while Lightning moves the batch to the device, and tells the moved tensors what they hold
(:mod:`lightning_liger.mirrored`), so that nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_liger.head.memory import share_memory
from lightning_liger.mirrored import cpu_values, forget, mirror, ordinary, sent
from lightning_liger.padding.reads import Reads


class NotPackable(Exception):
    """This mask does not describe one run of real tokens per row; the text says why."""


@dataclass(frozen=True)
class Layout:
    """The real tokens of a ``(B, S)`` batch, row by row, as one packed ``(1, T)`` sequence.

    Attributes:
        shape: ``(B, S)`` of the padded batch.
        lengths: tokens of each document; sums to ``T``. A document is a whole row's real tokens, or one of several
            that share the row.
        gather: ``(T,)`` int64, CPU: position of each real token in the flattened ``B * S`` batch.
        index: ``(B, S)`` int64, CPU: packed row of each position, -1 where it is padding.
        restart: ``(T,)`` int64, CPU: position of each token counted from the first real token of its row.
        filler: lengths of documents behind the real ones that nobody reads, see :meth:`lengthened`. ``gather`` and
            ``restart`` then have :attr:`size` entries instead of ``T``; ``index`` never names a row of theirs.
        room: tokens of the longest document that kernels are to be prepared for; 0 is the longest there is.
        derived: what others have computed from this layout and want to find again, under keys of their own.
    """

    shape: tuple[int, int]
    lengths: tuple[int, ...]
    gather: Tensor
    index: Tensor
    restart: Tensor
    filler: tuple[int, ...] = ()
    room: int = 0
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    _placed: dict[torch.device, Placed] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_mask(mask: Tensor) -> Layout:
        """Read a ``(B, S)`` mask of any numeric or bool dtype whose values are 0 (padding) and 1 (real).

        Raises:
            NotPackable: values other than 0 and 1, or rows whose real tokens are not one contiguous run.
            ValueError: a row without a single real token.
        """
        mask = mask.detach().to("cpu")
        real = mask != 0
        if mask.dtype != torch.bool and not torch.equal(real.to(mask.dtype), mask):
            raise NotPackable("the attention mask holds values other than 0 and 1")
        _refuse_empty_rows(real)
        return Layout.from_documents(real.to(torch.int64))

    @staticmethod
    def from_documents(number: Tensor) -> Layout:
        """Read a ``(B, S)`` integer map, CPU: 0 is padding, a run of one and the same number is a document.

        Raises:
            NotPackable: padding between the real tokens of a row.
        """
        real = number != 0
        columns = torch.arange(number.shape[1])
        first = real.to(torch.uint8).argmax(1)
        run = (columns >= first[:, None]) & (columns < (first + real.sum(1))[:, None])
        if not torch.equal(run, real):
            raise NotPackable("the attention mask has gaps between real tokens")
        gather = real.reshape(-1).nonzero()[:, 0]
        index = torch.full((number.numel(),), -1, dtype=torch.int64)
        index[gather] = torch.arange(gather.numel())
        begins = torch.ones_like(real)
        begins[:, 1:] = number[:, 1:] != number[:, :-1]
        starts = begins.reshape(-1)[gather].nonzero()[:, 0]
        lengths = torch.diff(starts, append=torch.tensor([gather.numel()]))
        return Layout(
            shape=(number.shape[0], number.shape[1]),
            lengths=tuple(int(n) for n in lengths.tolist()),
            gather=gather,
            index=index.view(number.shape),
            restart=(columns - first[:, None])[real],
        )

    def lengthened(self, size: int, documents: int, room: int) -> Layout:
        """The same tokens in front of filler, so that kernels and compiled code see one shape for many batches.

        Filler is a copy of the batch's first tokens, so that it is as ordinary as they are, cut into documents of like
        length, none of them empty. Nothing that leaves the backbone is made of it.

        Args:
            size: tokens with filler; ``documents``: documents with those of filler; ``room``: the longest of all.

        Raises:
            ValueError: the real tokens and documents do not fit, or the filler not into its documents.
        """
        rest, number = size - self.tokens, documents - len(self.lengths)
        if rest < number or number < 0 or rest > number * room or room < max(self.lengths):
            raise ValueError(f"no filler makes {size} tokens, {documents} documents, {room} at most of {self.lengths}")
        chosen = torch.cat([torch.arange(self.tokens), torch.arange(rest) % self.tokens])
        return replace(
            self,
            gather=self.gather[chosen],
            restart=self.restart[chosen],
            filler=tuple(rest // number + (i < rest % number) for i in range(number)),
            room=room,
            derived={},
            _placed={},
        )

    @property
    def tokens(self) -> int:
        """Real ones, ``T``."""
        return sum(self.lengths)

    @property
    def size(self) -> int:
        """Tokens that the backbone computes: the real ones and the filler."""
        return self.tokens + sum(self.filler)

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of each document, those of filler included; sums to :attr:`size`."""
        return self.lengths + self.filler

    @property
    def longest(self) -> int:
        return self.room or max(self.documents)

    @property
    def shape_key(self) -> tuple[int, int, int]:
        """All that the shapes of a packed call depend on."""
        return self.size, len(self.documents), self.longest

    @property
    def has_padding(self) -> bool:
        return self.tokens < self.shape[0] * self.shape[1]

    @property
    def reach(self) -> int:
        """Columns up to the last one that holds a real token."""
        return int((self.gather % self.shape[1]).max()) + 1

    @property
    def documents_share_rows(self) -> bool:
        return len(self.lengths) > self.shape[0]

    def on(self, device: torch.device) -> Placed:
        """This layout's tensors on ``device``, copied once and without waiting for the device."""
        if device not in self._placed:
            ends = torch.tensor((0, *self.documents)).cumsum(0).to(torch.int32)
            made = [sent(t, device) for t in (self.gather, self.index, self.restart, ends)]
            # inside the backbone nobody asks what they hold
            self._placed[device] = Placed(*(t if t is made[1] else ordinary(t) for t in made))
        return self._placed[device]


@dataclass(frozen=True)
class Placed:
    """The tensors of a :class:`Layout` on one device; ``cu_seqlens`` is int32, one more than documents."""

    gather: Tensor
    index: Tensor
    restart: Tensor
    cu_seqlens: Tensor


def _refuse_empty_rows(real: Tensor) -> None:
    if (empty := (~real.any(1)).nonzero()).numel():
        rows = ", ".join(str(int(r)) for r in empty[:5, 0])
        raise ValueError(
            f"attention_mask marks every position of row {rows} as padding: an empty document cannot be trained "
            "on. Drop such samples in the dataset or collate function, or set padding_free=False to let the model "
            "see them as they are."
        )


class LayoutBook:
    """Knows, for the batch in flight, what its device tensors hold, and the layouts that were read off them.

    Attributes:
        follow: tell the tensors of a batch what they hold. Compiled code is made for ordinary tensors only.
        device_reads: how often a value had to be read back from the device.
        reads: what is read at padded positions of sharded models.
    """

    def __init__(self) -> None:
        self.follow = True
        self.device_reads = 0
        self.reads = Reads()
        self._batch: list[Tensor] = []
        self._layouts: dict[tuple[int, int, Hashable], tuple[Tensor, Layout]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutBook:
        return LayoutBook()

    def __reduce__(self) -> tuple[type[LayoutBook], tuple[()]]:
        return LayoutBook, ()

    def pair(self, before: Any, after: Any) -> None:
        """Note the tensors of a batch before and after its transfer. Forgets the previous batch."""
        self.close()
        sources, moved = list(_tensors(before)), list(_tensors(after))
        if not self.follow or len(sources) != len(moved):
            return
        shapes = {s.shape for s in sources if not s.is_floating_point()}
        for source, target in zip(sources, moved, strict=True):
            if source.device.type != "cpu" or source.shape != target.shape or share_memory(source, target):
                continue
            # floats are followed where they are masks, not where they are features
            if source.is_floating_point() and source.shape not in shapes:
                continue
            if target.is_contiguous():
                self._batch.append(mirror(target, source.clone(memory_format=torch.contiguous_format)))

    def close(self) -> None:
        """Forget the batch; its tensors are ordinary ones again."""
        for tensor in self._batch:
            forget(tensor)
        self._batch.clear()
        self._layouts.clear()

    def read(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` on the CPU, read back from the device (counted) if they are not known there."""
        values = cpu_values(tensor)
        if values is None:
            self.device_reads += 1
            values = tensor.detach().to("cpu")
        return values

    def layout(
        self, tensor: Tensor, make: Callable[[Tensor], Layout] = Layout.from_mask, name: Hashable = "mask"
    ) -> Layout:
        """``make`` of the CPU values of ``tensor``; kept under ``name`` while the batch is in flight.

        Raises:
            NotPackable, ValueError: as ``make`` does.
        """
        values = cpu_values(tensor)
        if values is None or values is tensor:
            return make(self.read(tensor))
        if values.is_inference():
            return make(values)  # nothing tells whether it was written to since
        key = (id(values), values._version, name)
        if key not in self._layouts:
            # held together, so that the id stays theirs
            self._layouts[key] = (values, make(values))
        return self._layouts[key][1]


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a batch, whatever it is made of."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, f.name) for f in fields(leaf)])
