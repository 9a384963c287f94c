"""``lightning-liger export``: a Hugging Face model from a Lightning checkpoint, a file or a sharded directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.targets import load

DTYPES = ("bfloat16", "float16", "float32")


def parser() -> argparse.ArgumentParser:
    """The options, as ``--help`` shows them."""
    made = argparse.ArgumentParser(
        prog="lightning-liger export",
        description="Write a Hugging Face model (safetensors, config, tokenizer) from a Lightning checkpoint, in one "
        "process and without a GPU. Checkpoints that liger_fsdp saved need none of your code.",
    )
    add = made.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a .ckpt file, or the directory of a sharded checkpoint")
    add("out", metavar="OUT", help="directory that from_pretrained will load")
    add("--model", metavar="PATH", help="path of the model inside of the LightningModule, if there are several")
    add("--dtype", choices=DTYPES, help="of the weights that are written (default: as they were trained)")
    add(
        "--tokenizer", metavar="NAME", help="a tokenizer to save beside: a directory, or a name that transformers knows"
    )
    add(
        "--module",
        metavar="WHERE:CLASS",
        help="the LightningModule (file.py:Class or package.module:Class), for checkpoints saved without liger_fsdp",
    )
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of one file of weights (default: %(default)s)")
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand; the exit code."""
    given = parser().parse_args(argv)
    if not Path(given.checkpoint).exists():
        raise CommandError(f"CHECKPOINT {given.checkpoint}: there is no such file or directory.")
    from lightning_liger.parallel.export import export_checkpoint

    kind = load(given.module, "--module") if given.module else None
    if kind is not None and not hasattr(kind, "load_from_checkpoint"):
        raise CommandError(f"--module {given.module}: expected a LightningModule class, found {kind!r}.")
    try:
        module = kind and kind.load_from_checkpoint(given.checkpoint, map_location="cpu", weights_only=False)
        tokenizer = _tokenizer(given.tokenizer) if given.tokenizer else None
        export_checkpoint(
            given.checkpoint,
            given.out,
            given.model,
            given.dtype,
            tokenizer,
            module,
            max_shard_size=given.max_shard_size,
        )
    except (ValueError, OSError) as error:
        raise CommandError(str(error), code=1) from error
    print(f"{given.out}: written; load it with from_pretrained({given.out!r}).")
    return 0


def _tokenizer(name: str) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(name)
