"""The ways to train a long document: each has one feature more than the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rung:
    """One way to train.

    Attributes:
        key: its name on the command line. name: its row in the table. meaning: one clause for people.
        options: of :class:`lightning_liger.LigerCallback`; None trains without it.
        strategy: options of :class:`lightning_liger.LigerFSDPStrategy`; None for Lightning's own single device.
        needs_cuda: it has no effect elsewhere.
    """

    key: str
    name: str
    meaning: str
    options: Mapping[str, Any] | None = None
    strategy: Mapping[str, Any] | None = None
    needs_cuda: bool = False


@dataclass(frozen=True)
class _Feature:
    key: str
    name: str
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] | None = None
    needs_cuda: bool = False


# compiled blocks are another subject: a compilation for every length would be most of the time
_WITHOUT: dict[str, Any] = {
    "kernels": False,
    "fused_head": False,
    "padding_free": False,
    "tiled_mlp": False,
    "compile": False,
    "verify": "off",
    "verbose": False,
}
_FULL = {"activation_checkpointing": "full"}
_FEATURES = (
    _Feature("kernels", "+kernels", "fused Triton kernels for norms, MLPs and rotary embeddings", {"kernels": True}, None, True),
    _Feature("head", "+fused head", "the LM head and its loss in chunks", {"fused_head": True}),
    _Feature("padding", "+packed attention", "one packed document, attention by the fastest kernel", {"padding_free": True}),
    _Feature("checkpointing", "+checkpointing", "liger_fsdp, blocks computed again in backward", {}, _FULL),
    _Feature("tiled", "+MLPs in chunks", "tiled_mlp=True: one chunk's intermediate activations", {"tiled_mlp": True}),
    _Feature(
        "offload", "+offload", "activation_offload=True: blocks' inputs in host memory", {},
        {"activation_offload": True}, True,
    ),
)  # fmt: skip
PLAIN = Rung("plain", "plain", "the module as it is, without this package")
KEYS = tuple(feature.key for feature in _FEATURES)


def rungs(chosen: tuple[str, ...] = KEYS, *, cuda: bool) -> list[Rung]:
    """Plain, and the chosen features one by one, without those that have no effect here."""
    made = [PLAIN]
    options, strategy = dict(_WITHOUT), None
    for feature in _FEATURES:
        if feature.key not in chosen or (feature.needs_cuda and not cuda):
            continue
        options = {**options, **feature.options}
        if feature.strategy is not None:
            strategy = {**(strategy or {}), **feature.strategy}
        made.append(Rung(feature.key, feature.name, feature.meaning, options, strategy, feature.needs_cuda))
    return made
