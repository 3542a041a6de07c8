"""A causal language model of Hugging Face `transformers` is fine-tuned on a device smaller than its training state.

    python examples/finetune_huggingface.py                          # a small Llama with random weights
    python examples/finetune_huggingface.py --lora --verify          # adapters alone; and does plain PyTorch agree?
    python examples/finetune_huggingface.py path/to/model --memory 6GiB --save path/to/tuned

The text is the source of Python's own standard library, line by line, a byte a token. A model of yours is a folder that
`save_pretrained` wrote or `huggingface_hub.snapshot_download` returned; its tokenizer would give better tokens. Needs
`pip install 'hydra_engine[huggingface]'`.
"""

import argparse
import copy
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.integrations.huggingface import (
    causal_lm_loss,
    inputs_and_labels,
    load_pretrained,
    num_target_tokens,
    sequential,
)

CONTEXT = 48  # tokens of a line at most
BATCH_SIZE = 4
PADDING = 0  # a byte that source does not hold
IGNORED = -100  # the label that the loss leaves out
SMALL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}


class Lines(Dataset):
    """Lines of a text, evenly spaced and padded on the right, in the form that the library's collators make."""

    def __init__(self, text, num_lines):
        lines = [line for line in text.split(b"\n") if line.strip()]
        if len(lines) < num_lines:
            raise ValueError(f"text: {len(lines)} lines, limit: at least {num_lines}; train for fewer steps")
        self.lines = lines[:: len(lines) // num_lines][:num_lines]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = torch.tensor(list(self.lines[index][:CONTEXT]))
        ids = torch.full((CONTEXT,), PADDING)
        ids[: len(line)] = line
        mask = torch.arange(CONTEXT) < len(line)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, IGNORED)}


def read_text():
    """The source of the standard library."""
    return b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def make_model(args):
    """The model to train, from a folder or anew; with adapters if asked for."""
    torch.manual_seed(args.seed)
    if args.path is not None:
        model = load_pretrained(args.path).train()  # which comes in evaluation mode
        if model.config.vocab_size < 256:
            raise ValueError(f"path: a vocabulary of {model.config.vocab_size}, limit: 256, one for each byte")
    else:
        tokens = {"vocab_size": 256, "pad_token_id": PADDING, "bos_token_id": None, "eos_token_id": 10}
        model = LlamaForCausalLM(LlamaConfig(**SMALL, **tokens, attention_dropout=0.1))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    return model


def verify(model, loader, args, losses, trained):
    """Train the model itself in plain PyTorch, print whether it ends with the same bits, and return that."""
    start_s = time.perf_counter()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    plain_losses = []
    torch.manual_seed(args.seed)  # shuffling and dropout draw from this one stream
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        plain_losses.append(loss.item())
    pairs = list(zip(trained.parameters(), model.parameters(), strict=True))
    num_equal = sum(torch.equal(ours, theirs) for ours, theirs in pairs)
    print(f"verify: again in plain PyTorch, in {time.perf_counter() - start_s:.1f} s")
    print(f"  {'yes' if num_equal == len(pairs) else 'NO'}: {num_equal} of {len(pairs)} weight tensors are bit-equal")
    print(f"  {'yes' if losses == plain_losses else 'NO'}: losses of {len(losses)} steps are identical")
    return num_equal == len(pairs) and losses == plain_losses


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="folder of a causal LM (default: a small one, random)")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters and leave the weights as they are")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--memory", default="10MiB", help="of the device (default: 10MiB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for the trained model, or its adapters")
    parser.add_argument("--verify", action="store_true", help="train again in plain PyTorch and compare")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}, limit: at least 1")
    return args


def main():
    args = parse_args()
    torch.set_num_threads(1)  # results depend on their number, so both runs use the same
    model = make_model(args)
    plain = copy.deepcopy(model) if args.verify else None
    loader = DataLoader(Lines(read_text(), args.steps * BATCH_SIZE), batch_size=BATCH_SIZE, shuffle=True)

    task = ModelTask(
        sequential(model),
        causal_lm_loss,
        loader,
        args.lr,
        name="finetune",
        optimizer=torch.optim.AdamW,
        unpack=inputs_and_labels,
        loss_reduction=num_target_tokens,  # of micro-batches, for accumulation_steps=
        seed=args.seed,
    )
    device = EmulatedDevice(memory=args.memory)
    numbers = [p.numel() for p in model.parameters()]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state_bytes = 4 * sum(numbers) + 12 * trainable  # weights; gradients and AdamW's two moments
    print(f"{type(model).__name__}: {sum(numbers):,} parameters, {trainable:,} of them trained")
    print(f"training state {state_bytes / 2**20:.1f} MiB, {state_bytes / device.memory_bytes:.1f} times the device\n")
    orchestra = ModelOrchestrator([task], devices=[device])
    orchestra.verbose = 1  # the plan and live progress
    report = orchestra.train_models()
    report.raise_failures()
    losses = report.tasks["finetune"].losses
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}")

    if args.save is not None:
        model.save_pretrained(args.save)
        print(f"saved to {args.save}")
    if plain is not None:
        sys.exit(0 if verify(plain, loader, args, losses, model) else 1)


if __name__ == "__main__":
    main()
