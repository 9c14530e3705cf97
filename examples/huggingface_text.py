"""Fine-tune a small GPT-2 by Hugging Face's Trainer, whose DDP exchanges compressed gradients.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/huggingface_text.py --compression dither

The weights are random and the text is this file. Called again, it continues from its checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from horovod_fftcomp.integrations import huggingface

LENGTH = 64


def main() -> None:
    """Train, and print loss and compression ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="dither", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="(default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the ranks share the cores
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [{"input_ids": (part := text[at : at + LENGTH]), "labels": part}
            for at in range(0, len(text) - LENGTH, 8)]  # fmt: skip
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        str(args.out), max_steps=args.steps, per_device_train_batch_size=8, learning_rate=3e-3,
        save_steps=args.steps // 2, logging_steps=args.steps // 4, use_cpu=True, report_to=[],
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
    # The default, 100 dense steps first, is for trainings of thousands of steps.
    callback = huggingface.compress(trainer, args.compression, warmup_steps=0)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(args.out)))
    if trainer.is_world_process_zero() and callback.compression is not None:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        ratio = callback.compression.stats()["ratio"]
        print(f"loss {losses[-1]:.2f}, {ratio:.1f} times fewer bytes than float32")


if __name__ == "__main__":
    main()
