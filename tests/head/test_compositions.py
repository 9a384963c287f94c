"""Random compositions of operators end in the same loss and gradients on lazy logits as on ordinary ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_cases import Case, assert_same, case
from lazy_consumers import SHARP, SMOOTH, Consumer, hugging_face, perplexity_of, whole_reduction
from lazy_values import FULL, LAZY, State, lower
from torch import Tensor


def composed(names: list[str], consumer: Consumer, seed: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        r = random.Random(seed)
        state = State(x, x.dim() - 1)
        for name in names:
            state = {**LAZY, **FULL, "lower": lower}[name](state, r)
        return consumer(state, r)

    return function


def exact(consumer: Consumer) -> float:
    """The tolerance in fp64; some code computes in fp32 whatever it is given."""
    return 1e-5 if consumer in (hugging_face, perplexity_of) else 1e-9


QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def some_case(seed: int, padded: bool, dtype: torch.dtype) -> Case:
    r = random.Random(seed)
    return case(
        batch=r.choice([2, 3]), length=r.choice([4, 5]), dtype=dtype, bias=r.random() < 0.5, padded=padded, seed=seed
    )


@QUICK
@given(
    st.lists(st.sampled_from(sorted(LAZY)), max_size=6),
    st.sampled_from(SMOOTH + SHARP),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_what_should_stay_lazy_does_and_is_right(names: list[str], consumer: Consumer, seed: int, padded: bool) -> None:
    assert_same(some_case(seed, padded, torch.float64), composed(names, consumer, seed), exact(consumer), fused=True)


@QUICK
@given(
    st.lists(st.sampled_from(sorted(LAZY) + sorted(FULL) * 3), max_size=6),
    st.sampled_from(SMOOTH + SHARP),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_whatever_computes_the_values_is_right(names: list[str], consumer: Consumer, seed: int, padded: bool) -> None:
    assert_same(some_case(seed, padded, torch.float64), composed(names, consumer, seed), exact(consumer))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 6e-2)])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.sampled_from([*sorted(set(LAZY) - {"forbid"}), "lower"]), max_size=5),
    st.sampled_from([c for c in SMOOTH if c is not whole_reduction]),  # a sum that cancels has no digits in bf16
    st.integers(0, 10**6),
)
def test_low_precision(dtype: torch.dtype, tolerance: float, names: list[str], consumer: Consumer, seed: int) -> None:
    tolerance = 6e-2 if "lower" in names else tolerance
    assert_same(some_case(seed, seed % 2 == 0, dtype), composed(names, consumer, seed), tolerance, fused=True)


def _first_ids(s: State) -> Tensor:
    shape = list(s.x.shape)
    shape[s.v] = 1
    return torch.stack([torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)], dim=1)


@QUICK
@given(st.lists(st.sampled_from(sorted(LAZY)), max_size=4), st.integers(0, 10**6), st.booleans())
def test_two_models(names: list[str], seed: int, padded: bool) -> None:
    """Distillation: a function of the logits of two heads with one vocabulary."""
    student, teacher = some_case(seed, padded, torch.float64), some_case(seed, padded, torch.float64)
    teacher.weight = (teacher.weight.detach() * 0.5 + 0.1).requires_grad_()

    def function(a: Tensor, b: Tensor) -> Tensor:
        s, t = (State(x, x.dim() - 1) for x in (a, b))
        for name in names:
            s, t = LAZY[name](s, random.Random(seed)), LAZY[name](t, random.Random(seed))
        p, q = s.x.log_softmax(s.v), t.x.log_softmax(t.v)
        forms = [
            lambda: F.kl_div(p, q, log_target=True, reduction="batchmean"),
            lambda: F.kl_div(p, q.exp(), reduction="none").sum(s.v),
            lambda: (q.exp() * (q - p)).sum(s.v).mean(),
            lambda: F.kl_div(torch.logaddexp(p, q) - 0.6931, q, log_target=True, reduction="sum"),
            lambda: torch.stack([p, q]).logsumexp(0).amax(s.v).sum(),
            lambda: torch.stack([p, q], dim=1).gather(s.v + (s.v > 0), _first_ids(s)).mean() if s.v else p.sum(),
        ]
        return forms[seed % len(forms)]()

    assert_same([student, teacher], function, fused=True)
