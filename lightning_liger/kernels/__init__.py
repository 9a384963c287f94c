"""Triton kernels for single modules: found by structure, compared with the original, bound to instances only."""

from __future__ import annotations

from lightning_liger.kernels.registry import KernelBinding, KernelPatch, known_ops, register_kernel, unregister_kernel

__all__ = ["KernelBinding", "KernelPatch", "known_ops", "register_kernel", "unregister_kernel"]
