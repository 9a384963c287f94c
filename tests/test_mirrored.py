"""A copy on the CPU is the device tensor, bit for bit, or it is not there."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import Device, emulated_device
from torch import Tensor

from lightning_liger.mirrored import Mirrored, cpu_values, forget, mirror, ordinary


def mirrored(device: Device, values: Tensor) -> Tensor:
    return mirror(device.mark(values.clone()), values.clone())


def labels() -> Tensor:
    found = torch.arange(24).view(4, 6) % 7
    found[:, :2] = -100
    return found


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: x[..., 1:],
    "shift by padding": lambda x: F.pad(x, (0, 1), value=-100)[..., 1:].contiguous(),
    "flatten": lambda x: x.reshape(-1),
    "fold": lambda x: x.reshape(2, -1),
    "cast": lambda x: x.int().to(torch.int64),
    "float and back": lambda x: x.float().long(),
    "fill": lambda x: x.masked_fill(x == 3, -100),
    "where": lambda x: torch.where(x < 2, x, -100),
    "negate": lambda x: -x,
    "arithmetic": lambda x: (x * 2 + 1) % 5,
    "transpose": lambda x: x.transpose(0, -1),
    "join": lambda x: torch.cat([x, torch.full_like(x, -100)], -1),
    "roll": lambda x: x.roll(-1, -1),
    "choose": lambda x: x[x != -100],
    "numbers": lambda x: x.flatten()[(x.flatten() >= 0).nonzero()[:, 0]],
    "clone": lambda x: x.clone(),
    "chunk": lambda x: x.chunk(2, 0)[0],
    "flip": lambda x: x.flip(0).unsqueeze(0).squeeze(0),
}


def _set(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda x: _set(x, x == 1, -100),
    "slice": lambda x: _set(x, (Ellipsis, slice(0, 1)), 5),
    "fill": lambda x: x.masked_fill_(x == 2, 4),
    "add": lambda x: x.add_(1),
    "of a view": lambda x: x[..., :1].zero_(),
    "copy": lambda x: x.copy_(x.clone() * 3),
    "by a mask": lambda x: _set(x, x > 3, x[x > 3] - 1),
}


def test_any_sequence_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    with emulated_device(monkeypatch) as device:
        for _ in range(60):
            x, expected = mirrored(device, labels()), labels()
            done = []
            for _ in range(chance.randint(1, 6)):
                if chance.random() < 0.3:
                    name = chance.choice(list(WRITES))
                    with device.forbidden_to_wait():
                        WRITES[name](x)
                    WRITES[name](expected)
                else:
                    name = chance.choice(list(STEPS))
                    with device.forbidden_to_wait():
                        x = STEPS[name](x)
                    expected = STEPS[name](expected)
                done.append(name)
                known = cpu_values(x)
                assert type(x) is Mirrored and known is not None, done
                assert torch.equal(ordinary(x), expected) and torch.equal(known, expected), done


def test_every_view_sees_a_write_through_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device(monkeypatch) as device:
        x = mirrored(device, labels())
        view, copied = x[:, 1:].t(), x[:, 1:].reshape(-1)
        before = copied.clone()
        x[x == -100] = 0
        for t in (x, view):
            known = cpu_values(t)
            assert known is not None and torch.equal(known, ordinary(t)) and int(t.min()) == 0
        assert int(copied.min()) == -100 and torch.equal(cpu_values(copied), cpu_values(before))


def test_an_unfollowed_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def behind(x: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            x.add_(1)

    def from_unknown(x: Tensor) -> None:
        x[:, 0] = device.mark(torch.ones(4, dtype=torch.int64))

    def as_another_tensor(x: Tensor) -> None:
        ordinary(x).zero_()

    def scattered(x: Tensor) -> None:
        x.scatter_(1, torch.zeros_like(x), x.clone())

    def failing(x: Tensor) -> None:
        with pytest.raises((IndexError, RuntimeError)):
            x[:, 99] = 3
        x.random_(3)

    with emulated_device(monkeypatch) as device:
        for write in (behind, from_unknown, as_another_tensor, scattered, failing):
            x = mirrored(device, labels())
            view = x[:, 1:]
            write(x)
            assert cpu_values(x) is None and cpu_values(view) is None, write
            assert (x != -100).tolist() == (ordinary(x) != -100).tolist()


def test_what_is_not_followed_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device(monkeypatch) as device:
        x = mirrored(device, labels())
        unknown = device.mark(torch.ones(4, 6, dtype=torch.int64))
        table = torch.nn.Embedding(200, 3)
        for made in (x + unknown, unknown[x > 0], table(x.abs()), x.float() * 0.1, x.sort().values, x.double().exp()):
            assert type(made) is Tensor
        for made in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), copy.copy(x)):
            assert type(made) is Tensor and torch.equal(made, ordinary(x))
        assert repr(x) == repr(ordinary(x)) and x.is_contiguous() and isinstance(x, Tensor)
        masked = device.mark(torch.randn(4, 6, 2, requires_grad=True))
        with device.forbidden_to_wait():
            chosen = masked[x != -100]
        expected = masked[ordinary(x) != -100]
        assert torch.equal(chosen, expected)
        for a, b in zip(
            torch.autograd.grad(chosen.sum(), masked), torch.autograd.grad(expected.sum(), masked), strict=True
        ):
            assert torch.equal(a, b)
        with pytest.raises(IndexError):
            masked[x[:, :5] != -100]


def test_plain_views_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device(monkeypatch) as device:
        x = mirrored(device, labels())
        view = ordinary(x)[1:, 2:].t()
        known = cpu_values(view)
        assert type(view) is Tensor and known is not None and torch.equal(known, view)
        x.zero_()
        assert int(cpu_values(view).abs().sum()) == 0  # type: ignore[union-attr]
        forget(x)
        assert type(x) is Tensor and not vars(x) and cpu_values(view) is None
