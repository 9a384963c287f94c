"""The variants of one training: each has one feature more than the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_liger.settings import Settings

AS_PADDED = "as padded"
"""A budget of as many tokens as the largest padded batch of the plain run had positions."""


@dataclass(frozen=True)
class Variant:
    """One way to train the same module.

    Attributes:
        name: its row in the table.
        meaning: one clause for people who have read nothing.
        options: of :class:`lightning_liger.LigerCallback`, over those of the job; None trains without it.
        defaults: by option; where the job leaves that one out (None or False), these options are set.
        strategy: of the Trainer.
        same_batches: whether it sees the batches of the plain run, so that losses must be equal.
        own_batches: whether it sees batches that no other variant sees, so that its losses are its own.
        lower_precision: whether it computes in another precision than the plain run.
        skipped: why it is not measured, or ``""``.
        peer: of :data:`lightning_liger.bench.peers.PEERS`, which trains in place of Lightning; ``""`` for a variant of ours.
        arguments: of the peer.
    """

    name: str
    meaning: str
    options: Mapping[str, Any] | None
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strategy: str = "auto"
    same_batches: bool = True
    own_batches: bool = False
    lower_precision: bool = False
    skipped: str = ""
    peer: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def options_for(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the callback in a job that asks for ``own``."""
        known = {f.name for f in fields(Settings)}
        made = {k: v for k, v in own.items() if k in known}
        for option, values in self.defaults.items():
            if not made.get(option):
                made.update(values)
        # what a proof costs is paid once, and is no part of a step
        quiet = {"verbose": False, "verify": "off", "profile": None, "benchmark_steps": 0}
        return {**made, **(self.options or {}), **{k: v for k, v in quiet.items() if k in known}}


@dataclass(frozen=True)
class _Feature:
    key: str
    name: str
    meaning: str
    off: Mapping[str, Any] = field(default_factory=dict)


_FEATURES = (
    _Feature("bf16", "+bf16 policy", "fp32 weights, bf16 arithmetic, without autocast (strategy 'liger_fsdp')"),
    _Feature("kernels", "+kernels", "fused Triton kernels for norms, MLPs and rotary embeddings", {"kernels": False}),
    _Feature(
        "head",
        "+fused head",
        "the LM head and its loss in chunks, logits are never stored",
        {"fused_head": False, "head": None, "head_backend": "auto", "loss_normalization": "batch"},
    ),
    _Feature(
        "padding",
        "+padding-free",
        "the model computes real tokens only; your batches stay as they are",
        {"padding_free": False, "attention": "auto", "shape_buckets": "auto"},
    ),
    _Feature(
        "batches",
        "+token batches",
        "batches filled up to a number of tokens instead of a number of samples",
        {"max_tokens_per_batch": None, "length_fn": None, "overlong": "error"},
    ),
    _Feature("compile", "+compile", "the layers compiled with torch.compile", {"compile": False}),
)
FEATURES = tuple(feature.key for feature in _FEATURES)


PLAIN = Variant("plain", "your module as it is, without this package", None)


def one_by_one(
    skipped: Mapping[str, str], *, chosen: tuple[str, ...] = FEATURES, budget: int | str = AS_PADDED
) -> list[Variant]:
    """One variant per feature, each with all the features before it.

    Args:
        skipped: features that cannot be measured here, with the reason; they are not part of the later variants.
        chosen: the features to measure, of :data:`FEATURES`.
        budget: tokens of the token batches, where the job does not say.
    """
    known = {f.name for f in fields(Settings)}
    defaults: dict[str, dict[str, dict[str, Any]]] = {
        "batches": {"max_tokens_per_batch": {"max_tokens_per_batch": budget, "overlong": "own_batch"}},
        "compile": {"compile": {"compile": "auto"}},
    }
    found = []
    on: list[str] = []
    for feature in (f for f in _FEATURES if f.key in chosen):
        reason = skipped.get(feature.key, "")
        if feature.off and not known.intersection(feature.off):
            reason = reason or "this version has no such option"
        if not reason:
            on.append(feature.key)
        off = [f.off for f in _FEATURES if f.key not in on]
        found.append(
            Variant(
                feature.name,
                feature.meaning,
                {k: v for options in off for k, v in options.items() if k in known},
                {k: v for key in on for k, v in defaults.get(key, {}).items()},
                strategy="liger_fsdp" if "bf16" in on else "auto",
                same_batches="batches" not in on,
                lower_precision="bf16" in on,
                skipped=reason,
            )
        )
    return found


def all_at_once(skipped: Mapping[str, str], *, budget: int | str = AS_PADDED) -> list[Variant]:
    """The callback with its defaults, for a comparison with others than plain; see :func:`one_by_one`."""
    policy, *_, batches = one_by_one(skipped, chosen=("bf16", "kernels", "head", "padding", "batches"), budget=budget)
    return [ACCELERATED, replace(policy, options={}), replace(batches, options={})]


def options_of(names: set[str]) -> set[str]:
    """Options of the callback that belong to the features with these rows."""
    return {option for f in _FEATURES if f.name in names for option in f.off}


def feature(key: str) -> Variant:
    """One feature of a module that has them all bound already."""
    found = next(f for f in _FEATURES if f.key == key)
    return Variant(found.name, found.meaning, {})


ACCELERATED = Variant("accelerated", "the same module with callbacks=[LigerCallback()]", {})
