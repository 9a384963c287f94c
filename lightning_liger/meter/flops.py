"""Floating-point operations of a training step, counted from the model and the documents of its batch.

A multiply-add is two operations. Only matrix products count, as in "PaLM" (arXiv:2204.02311, appendix B): norms,
activations, softmax and the optimizer are left out.

* *Model* operations are what the mathematics of the batch asks for, however it is computed: real tokens and no
  padding, attention between pairs that see each other, head rows that a loss reads, no gradient of a frozen weight, no
  gradient of an input below which nothing is trained, nothing twice. They give the MFU.
* *Hardware* operations are those that ran: padding that was left in the batch, all head rows that were computed, what
  activation checkpointing computes again, and the scores that fused attention computes again in backward
  (Dao, arXiv:2307.08691, section 3.2). They give the HFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Product:
    """``rows @ weight``, with one weight of ``inputs * outputs`` entries for each row.

    Attributes:
        name: path of the module inside the model.
        inputs, outputs: sizes of the weight.
        rows: rows per token; ``top_k`` for experts that a router picks.
        weight_gradient: the weight is trained.
        input_gradient: something below is trained, so that the gradient goes on.
        recomputed: how often backward computes it again; 1 under activation checkpointing.
        routed: ``rows`` follow from how many experts a router picks.
    """

    name: str
    inputs: int
    outputs: int
    rows: float = 1.0
    weight_gradient: bool = True
    input_gradient: bool = True
    recomputed: float = 0.0
    routed: bool = False

    @property
    def forward(self) -> float:
        """Operations per token."""
        return 2.0 * self.inputs * self.outputs * self.rows

    @property
    def backward(self) -> float:
        """Operations per token, without what is computed again."""
        return self.forward * (self.weight_gradient + self.input_gradient)


@dataclass(frozen=True)
class Reach:
    """Which tokens of its document a token attends to.

    Attributes:
        causal: none that follow it.
        window: how many are in reach, itself included; on either side where it is not causal.
        chunk: only those of the same chunk of this many tokens.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def pairs(self, length: int) -> int:
        """Pairs of query and key in a document of ``length`` tokens."""
        if self.chunk is not None and length > self.chunk:
            whole, rest = divmod(length, self.chunk)
            return whole * self._pairs(self.chunk) + self._pairs(rest)
        return self._pairs(length)

    def _pairs(self, length: int) -> int:
        beyond = 0 if self.window is None else max(length - self.window, 0)
        if self.causal:
            return length * (length + 1) // 2 - beyond * (beyond + 1) // 2
        return length * length - beyond * (beyond + 1)


@dataclass(frozen=True)
class Attention:
    """``softmax(q @ k.T) @ v`` of one layer. Key heads that several query heads share change nothing.

    Attributes:
        name: path of the layer inside the model.
        heads: query heads. key_size, value_size: of one head.
        reach: who sees whom.
        gradient: something below is trained.
        recomputed: how often backward computes it again, besides the scores.
        times: how often it runs; more than once in models that loop over their layers.
    """

    name: str
    heads: int
    key_size: int
    value_size: int
    reach: Reach = Reach()
    gradient: bool = True
    recomputed: float = 0.0
    times: float = 1.0

    @property
    def forward(self) -> float:
        """Operations per pair: one product with keys, one with values."""
        return 2.0 * self.heads * (self.key_size + self.value_size) * self.times

    @property
    def backward(self) -> float:
        """Operations per pair for gradients of weights, values, queries and keys."""
        return 2.0 * self.forward * self.gradient

    @property
    def scores(self) -> float:
        """Operations per pair with which fused kernels compute the scores again in backward."""
        return 2.0 * self.heads * self.key_size * self.gradient * self.times


@dataclass(frozen=True)
class Call:
    """One run of a backbone.

    Attributes:
        lengths: real tokens of each document.
        executed: lengths that were computed: the same where padding was removed, else the padded row for each row.
        gradient: it was differentiated; False for a teacher or a reference model.
    """

    lengths: tuple[int, ...]
    executed: tuple[int, ...] = ()
    gradient: bool = True

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def positions(self) -> int:
        return sum(self.executed or self.lengths)


@dataclass(frozen=True)
class Flops:
    """Operations: ``forward`` and ``backward`` of the model, and all that ran on the ``hardware``.

    ``attention`` is the part of the model's that scales with pairs of tokens.
    """

    forward: float = 0.0
    backward: float = 0.0
    hardware: float = 0.0
    attention: float = 0.0

    @property
    def model(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.hardware + other.hardware,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class _PerPair:
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0


@dataclass(frozen=True)
class ModelCost:
    """What one backbone costs.

    Attributes:
        products, attentions: all that is counted.
        unknown: what is not, and why; not empty means that :meth:`flops` is too little.
    """

    products: tuple[Product, ...] = ()
    attentions: tuple[Attention, ...] = ()
    unknown: tuple[str, ...] = ()
    _linear: tuple[float, float, float] = field(init=False, repr=False, compare=False)
    _pairs: dict[Reach, _PerPair] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        p = self.products
        again = sum(x.forward * x.recomputed for x in p)
        object.__setattr__(self, "_linear", (sum(x.forward for x in p), sum(x.backward for x in p), again))
        pairs = {}
        for reach in {a.reach for a in self.attentions}:
            mine = [a for a in self.attentions if a.reach == reach]
            pairs[reach] = _PerPair(
                sum(a.forward for a in mine),
                sum(a.backward for a in mine),
                sum(a.forward * a.recomputed + a.scores for a in mine),
            )
        object.__setattr__(self, "_pairs", pairs)

    @property
    def per_token(self) -> float:
        """Forward operations of the products for one token."""
        return self._linear[0]

    def flops(self, call: Call) -> Flops:
        """Operations of one run."""
        forward, backward, again = self._linear
        if not call.gradient:
            backward = again = 0.0
        tokens, positions = call.tokens, call.positions
        hardware = (forward + backward + again) * positions
        pairs_forward = pairs_backward = 0.0
        lengths = _counted(call.lengths)
        executed = [] if call.executed == call.lengths else _counted(call.executed)
        for reach, cost in self._pairs.items():
            real = sum(n * reach.pairs(length) for length, n in lengths)
            ran = sum(n * reach.pairs(length) for length, n in executed) if executed else real
            pairs_forward += cost.forward * real
            pairs_backward += cost.backward * real * call.gradient
            hardware += (cost.forward + (cost.backward + cost.again) * call.gradient) * ran
        attention = pairs_forward + pairs_backward
        return Flops(forward * tokens + pairs_forward, backward * tokens + pairs_backward, hardware, attention)


def _counted(lengths: Iterable[int]) -> list[tuple[int, int]]:
    return list(Counter(lengths).items())


def head_flops(head: Product, needed: float, computed: float, *, gradient: bool = True) -> Flops:
    """Operations of a language-model head over rows of hidden states.

    Args:
        needed: rows that a loss reads. computed: rows whose logits were computed.
        gradient: the loss was differentiated.
    """
    backward = head.backward if gradient else 0.0
    return Flops(head.forward * needed, backward * needed, (head.forward + backward) * computed)
