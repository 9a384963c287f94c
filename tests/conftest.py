"""Shared by all tests: quiet Trainers, and an end to what one test could leave behind for the next."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)


@pytest.fixture(autouse=True)
def one_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() == before


@pytest.fixture(autouse=True)
def no_address_is_inherited() -> Iterator[None]:
    """A training leaves its port in the environment, and may still listen to it when a later test starts a process."""
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
