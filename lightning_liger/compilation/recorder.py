"""Records what a function launches on a CUDA device, to launch it again at one go."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_liger.device_memory import allowed_bytes

_USED = 0.95  # of what the process may have; the rest is for fragments


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """Weights that autocast casts once for a whole forward are cast by every block for itself.

    Left alone where autocast is off: compiled code asks for this flag before anything else.
    """
    cached = torch.is_autocast_cache_enabled()
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class Recorder:
    """Makes CUDA graphs that share one pool of memory: they must be replayed in the order in which they were made."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def has_room(self) -> bool:
        """Whether the activations of one more step fit beside those of the largest one so far.

        Asked between two steps. A recording keeps its activations in memory when batches of other shapes run.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        largest = torch.cuda.memory_reserved(device)
        activations = largest - torch.cuda.memory_allocated(device)
        return largest + activations <= _USED * allowed_bytes(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream that recordings are made on, after what was launched before and before what comes after."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def place(self, tensor: Tensor | None) -> Tensor | None:
        """``tensor`` without holding its memory, which the next recording may write to when it is replayed."""
        return None if tensor is None else _unowned(tensor)

    def record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        """What ``function`` gives, not computed yet, and the graph whose ``replay()`` computes it."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what is collected meanwhile may free memory and events of other streams
        try:
            # weights that autocast keeps in bf16 outside of a graph are gone when it is replayed
            with self.aside(), without_cached_casts():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return out, graph


class _Place:
    """Bytes on a device, described by the protocol that tensors are made from without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _unowned(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    held = torch.as_tensor(_Place(tensor.data_ptr(), int(size)), device=tensor.device)
    return held.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
