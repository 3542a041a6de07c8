"""One GPT on one device, two on two, four on four: how much more do more devices train in the same time?

    python examples/scaling_hydra.py                    # small GPTs on emulated devices
    python examples/scaling_hydra.py --most 2 --per-device 3        # up to two devices, with three models each
    python examples/scaling_hydra.py --scale paper --text wikitext.txt      # GPT-2 XL with 100 blocks, on GPUs

Each model trains with batch size 1 and learning rate 1e-4, as Hydra's example of this name does. Time for planning is
left out. Not measured on a GPU. See `gpt2.py`.
"""

import os

import torch
from gpt2 import SCALES, Windows, make_devices, make_task, parser_of, read_text

from hydra_engine import ModelOrchestrator

LR = 1e-4
BLOCKS = {"tiny": 8, "paper": 100}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of each model (default: 8)")
    parser.add_argument("--most", type=int, help="devices (default: four emulated ones, or all GPUs)")
    parser.add_argument("--per-device", type=int, default=1, help="models (default: 1)")
    args = parser.parse_args()
    if args.steps < 1 or args.per_device < 1:
        parser.error(f"--steps {args.steps} --per-device {args.per_device}, limit: at least 1 each")
    torch.set_num_threads(1)  # one compute thread for each emulated device

    scale = SCALES[args.scale]._replace(num_blocks=BLOCKS[args.scale])
    most = args.most or (4 if scale.memory is not None else max(1, torch.cuda.device_count()))
    make_devices(scale, most)  # ends the program where there are fewer
    windows = Windows(read_text(args.text), args.steps, scale.context)
    if scale.memory is not None:
        print(f"emulated devices share {os.cpu_count()} cores")
    print("devices  models  seconds  steps/s  times one device's  devices computed")
    number, first = 1, None
    while number <= most:
        tasks = [
            make_task(scale, windows, name=f"gpt-{k}", batch_size=1, lr=LR, seed=args.seed + k)
            for k in range(number * args.per_device)
        ]
        orchestra = ModelOrchestrator(tasks, devices=make_devices(scale, number))
        orchestra.verbose = 0
        orchestra.generate()
        report = orchestra.train_models()
        report.raise_failures()
        rate = sum(task.steps for task in report.tasks.values()) / report.makespan_s
        first = first or rate
        busy = sum(device.busy_s for device in report.devices) / number / report.makespan_s
        print(
            f"{number:7}  {len(tasks):6}  {report.makespan_s:7.2f}  {rate:7.2f}  {rate / first:18.2f}  {busy:16.0%}",
            flush=True,
        )
        number *= 2


if __name__ == "__main__":
    main()
