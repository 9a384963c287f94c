"""A LitGPT model in a LightningModule: ``litgpt.model.GPT`` returns logits, the loss is written by hand.

The module and the data know nothing of the callback; the Trainer's line does. Without litgpt this says how to get it.
"""

from __future__ import annotations

import importlib.util
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from lightning_liger import LigerCallback
from recipe import Stopwatch, options, parser, prepare, show_gain
from sft_module import Batch, SFTDataModule, pretrained_arguments


class LitGPTModule(L.LightningModule):
    """Random weights of one of LitGPT's architectures.

    Args:
        tokenizer: checkpoint directory or name, for the size of the vocabulary.
        name: of LitGPT's configurations, such as ``"pythia-160m"`` or ``"Llama-3.2-1B"``.
        sizes: fields of the configuration that are to differ.
        lr: learning rate of AdamW.
    """

    def __init__(self, tokenizer: str, name: str, sizes: dict[str, int] | None = None, lr: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        from litgpt import Config
        from litgpt.model import GPT

        vocabulary = len(AutoTokenizer.from_pretrained(**pretrained_arguments(tokenizer)))
        self.gpt = GPT(Config.from_name(name, padded_vocab_size=vocabulary, **(sizes or {})))
        self.gpt.apply(self.gpt._init_weights)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.gpt(batch["input_ids"])
        targets = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--name", default="pythia-160m", help="one of LitGPT's configurations (default: %(default)s)")
    args = made.parse_args(argv)
    if importlib.util.find_spec("litgpt") is None:
        print("This example needs LitGPT: pip install --no-deps litgpt  (its pins contradict transformers 5).")
        return 0
    args = prepare(args)
    small = {"n_layer": args.layers, "n_embd": args.hidden_size, "n_head": args.hidden_size // 64}
    sizes = {
        "block_size": args.max_length,
        **({} if args.gpu else {**small, "intermediate_size": 4 * args.hidden_size}),
    }

    def make() -> tuple[LitGPTModule, SFTDataModule]:
        module = LitGPTModule(args.model, args.name, sizes, args.lr)
        return module, SFTDataModule(args.data, args.model, args.batch_size, args.max_length, args.seed)

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, **options(args))
    trainer.fit(module, data)
    return show_gain(args, callback, watch, make)


if __name__ == "__main__":
    sys.exit(main())
