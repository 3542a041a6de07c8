"""Hydra's main experiment: 12 GPTs, two batch sizes by six learning rates, train together. Which is best?

    python examples/hydra_12_models.py                  # small GPTs on two emulated devices, in seconds
    python examples/hydra_12_models.py --half a         # the first three learning rates; b: the other three
    python examples/hydra_12_models.py --scale paper --text wikitext.txt    # GPT-2 XL, on all GPUs of this machine

Twelve times GPT-2 XL are 19 billion parameters: 75 GB of DRAM and a little more. Not measured on a GPU. See `gpt2.py`.
"""

import torch
from gpt2 import SCALES, Windows, make_devices, make_task, parser_of, read_text

from hydra_engine import ModelOrchestrator

LRS = (3e-4, 1e-4, 5e-5, 6e-5, 1e-5, 2e-5)
BATCH_SIZES = (16, 8)
HALVES = {"a": LRS[:3], "b": LRS[3:], None: LRS}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--half", choices=("a", "b"), help="train six of the models (default: all 12)")
    parser.add_argument("--steps", type=int, default=4, help="of batch size 16, and twice as many of 8 (default: 4)")
    parser.add_argument("--devices", type=int, help="default: two emulated ones, or all GPUs")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}, limit: at least 1")
    torch.set_num_threads(1)  # one compute thread for each emulated device

    scale = SCALES[args.scale]
    number = 2 if scale.memory is not None else max(1, torch.cuda.device_count())
    devices = make_devices(scale, args.devices or number)
    text = read_text(args.text)
    num_train = len(text) * 9 // 10
    windows = Windows(text[:num_train], args.steps * max(BATCH_SIZES), scale.context)
    validation = Windows(text[num_train:], max(BATCH_SIZES), scale.context)
    tasks = [
        make_task(scale, windows, validation, name=f"lr={lr:g} batch={size}", batch_size=size, lr=lr, seed=args.seed)
        for lr in HALVES[args.half]
        for size in BATCH_SIZES
    ]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    plan = orchestra.generate()
    print(plan)
    report = orchestra.train_models()
    report.raise_failures()

    print(f"\n{len(tasks)} models in {report.makespan_s:.1f} s on {len(devices)} devices; best first")
    for task in sorted(report.tasks.values(), key=lambda each: each.validation_losses[-1]):
        losses = f"loss {task.losses[0]:.4f} -> {task.losses[-1]:.4f}"
        print(f"{task.name:<20} {task.steps:4} steps  {losses}  validation loss {task.validation_losses[-1]:.4f}")


if __name__ == "__main__":
    main()
