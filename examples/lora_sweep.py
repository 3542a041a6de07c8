"""Trials of LoRA over one frozen model of Hugging Face `transformers`, which is larger than the device.

    python examples/lora_sweep.py                            # four trials over a small Llama with random weights
    python examples/lora_sweep.py --verify                   # and does plain PyTorch train each alone to the same bits?
    python examples/lora_sweep.py path/to/model --memory 6GiB --save path/to/best

All trials hold the same base, so DRAM holds it once. With the policy "in-step" they pass through its shards side by
side, and a device loads each shard once for all of them. The text is the source of Python's `argparse`, a byte a token.
A model of yours is a folder that `save_pretrained` wrote. Needs `pip install 'hydra_engine[huggingface]'`.
"""

import argparse
import copy
import sys
import sysconfig
import time
from itertools import product
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.integrations.huggingface import adapters, causal_lm_loss, load_pretrained, sequential

CONTEXT, BATCH_SIZE = 16, 2
SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 10, "num_attention_heads": 4}
RANKS, LRS = (2, 8), (1e-3, 1e-2)


def make_batches(num_steps):
    """Windows of the source of `argparse`, the same for every trial."""
    size = num_steps * BATCH_SIZE * CONTEXT
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    if len(text) < size:
        raise ValueError(f"--steps {num_steps}, limit: {len(text) // (BATCH_SIZE * CONTEXT)}, for which there is text")
    return [(ids, ids) for ids in torch.tensor(list(text[:size])).view(num_steps, BATCH_SIZE, CONTEXT)]


def make_base(path):
    if path is not None:
        return load_pretrained(path).train()
    torch.manual_seed(0)
    tokens = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 10}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **tokens))


def is_verified(model, lr, batches, losses, trained):
    """Train a trial alone in plain PyTorch, print whether it ends with the same bits, and return that."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    torch.manual_seed(0)  # dropout of adapters draws from it
    plain_losses = []
    for ids, labels in batches:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        plain_losses.append(loss.item())
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return losses == plain_losses and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="folder of a causal LM (default: a small one, random)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--memory", help="of the device (default: a third of the base's weights)")
    parser.add_argument("--save", type=Path, help="folder for the adapters of the best trial")
    parser.add_argument("--verify", action="store_true", help="train each trial again in plain PyTorch and compare")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.set_num_threads(1)  # results depend on their number, so both runs use the same
    base = make_base(args.path)
    base_bytes = sum(parameter.nbytes for parameter in base.parameters())
    settings = list(product(RANKS, LRS))
    options = {"lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    models = adapters(base, [LoraConfig(r=r, lora_alpha=2 * r, **options) for r, _ in settings])
    plain = copy.deepcopy(models) if args.verify else []  # all of them over one copy of the base

    batches = make_batches(args.steps)
    tasks = [
        ModelTask(
            sequential(model),
            causal_lm_loss,
            batches,
            lr,
            name=f"r={r} lr={lr:g}",
            optimizer=torch.optim.AdamW,
            seed=0,
        )
        for model, (r, lr) in zip(models, settings, strict=True)
    ]
    device = EmulatedDevice(memory=args.memory or base_bytes // 3)
    orchestra = ModelOrchestrator(tasks, devices=[device], policy="in-step")
    orchestra.verbose = 0
    plan = orchestra.generate()
    weights = sum(task.dram["weights"] for task in plan.tasks.values())
    print(plan)
    print(f"\nbase {base_bytes / 2**20:.1f} MiB, {base_bytes / device.memory_bytes:.1f} times the device")
    print(f"weights of all {len(tasks)} trials, the base with them: {weights / 2**20:.1f} MiB of DRAM")
    start_s = time.perf_counter()
    report = orchestra.train_models()
    report.raise_failures()
    print(f"trained in {time.perf_counter() - start_s:.1f} s\n")
    losses = [report.tasks[task.name].losses for task in tasks]
    ranking = sorted(range(len(tasks)), key=lambda k: losses[k][-1])
    for k in ranking:
        print(f"{tasks[k].name:<14} loss {losses[k][0]:.3f} -> {losses[k][-1]:.3f}")

    if args.save is not None:
        models[ranking[0]].save_pretrained(args.save)
        print(f"the adapters of {tasks[ranking[0]].name} are in {args.save}")
    if plain:
        verdicts = [is_verified(plain[k], lr, batches, losses[k], models[k]) for k, (_, lr) in enumerate(settings)]
        print(f"verify: {sum(verdicts)} of {len(verdicts)} trials have the bits of plain PyTorch")
        sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
