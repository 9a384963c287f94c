"""Device tensors whose values the CPU knows as well; see :mod:`lightning_liger.mirrored.tensor`."""

from lightning_liger.mirrored.tensor import Mirrored, arange, cpu_values, forget, mirror, ordinary, sent

__all__ = ["Mirrored", "arange", "cpu_values", "forget", "mirror", "ordinary", "sent"]
