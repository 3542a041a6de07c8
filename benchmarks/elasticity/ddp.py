"""Plain PyTorch under torchrun: DistributedDataParallel, with a checkpoint every few steps, from which it goes on."""

import os

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel


def main():
    options = workload.options()
    workload.one_thread()
    log = workload.Log(options.commits)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    log.add(rank=rank, num_ranks=num_ranks, pid=os.getpid())
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), workload.LR)
    path, done = options.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["steps"]
    parallel = DistributedDataParallel(model)
    for step, (inputs, target) in enumerate(workload.batches(options.steps), 1):
        if step <= done:
            continue
        x, y = (each.chunk(num_ranks)[rank] for each in (inputs, target))  # a mean over equal parts, as DDP takes it
        optimizer.zero_grad()
        workload.loss_fn(parallel(x), y).backward()
        optimizer.step()
        if rank == 0:
            log.add(task="gpt", step=step)
            if step % workload.CHECKPOINT_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step}
                torch.save(state, path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)
    if rank == 0:
        log.add_weights(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
