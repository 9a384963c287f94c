"""The fenced blocks of Markdown pages, and the small things that stand in for what a page takes for granted."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->")
_FENCE = re.compile(r"^( *)(`{3,})\s*(\w*)")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        line: of its first line in the page, from 1.
        not_run: the reason of a ``<!-- not run: reason -->`` in front of it, or "".
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(page for page in found if page.name != "CHANGELOG.md")


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page``, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number, reason = 0, ""
    while number < len(lines):
        fence, mark = _FENCE.match(lines[number]), _NOT_RUN.search(lines[number])
        number += 1
        if fence:
            start = number
            while lines[number].strip() != fence[2]:
                number += 1
            yield Block(page, start + 1, fence[3], textwrap.dedent("\n".join(lines[start:number])) + "\n", reason)
            number += 1
        if mark or lines[number - 1].strip():
            reason = mark[1] if mark else ""


def compiled(block: Block) -> Any:
    """The code of a Python block, whose line numbers are those of the page."""
    tree = ast.parse(block.text, filename=str(block.page))
    return compile(ast.increment_lineno(tree, block.line - 1), str(block.page), "exec")


def names(block: Block) -> set[str]:
    """The names that a Python block reads or writes."""
    return {node.id for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)}


def stand_ins() -> dict[str, Callable[[], Any]]:
    """What a block may use without making it: a name, and how to make one. Add what your page needs."""
    import lightning as L
    import torch
    from one_model import collate, loader, make_model, sample
    from only_lightning import TinyData, TinyModule

    import lightning_liger

    def fitted_trainer() -> Any:
        trainer = L.Trainer(strategy="liger_fsdp")
        trainer.fit(TinyModule(), TinyData())
        return trainer

    return {
        "L": lambda: L,
        "torch": lambda: torch,
        "LigerCallback": lambda: lightning_liger.LigerCallback,
        "LigerFSDPStrategy": lambda: lightning_liger.LigerFSDPStrategy,
        "Settings": lambda: lightning_liger.Settings,
        "accelerate": lambda: lightning_liger.accelerate,
        "ExistingModule": lambda: TinyModule,
        "ExistingDataModule": lambda: TinyData,
        "existing_module": TinyModule,
        "module": TinyModule,
        "existing_datamodule": TinyData,
        "model": make_model,
        "batch": lambda: collate([sample(index) for index in range(4)]),
        "dataloader": lambda: loader(4),
        "trainer": fitted_trainer,
    }
