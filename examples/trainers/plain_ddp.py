"""A plain DDP loop: accumulation, a scheduler, a checkpoint.

torchrun --standalone --nproc-per-node 2 examples/trainers/plain_ddp.py --out out
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import ACCUMULATE, FREEZE, STEPS, Examples, arguments, network, own_device, own_file, report
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp

args = arguments()
device = own_device(args.device)
dist.init_process_group(args.backend)
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(network().to(device))
opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(FREEZE), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)
common = os.path.join(args.out, "common.pt")

if args.resume:
    saved = torch.load(common, weights_only=True)
    model.load_state_dict(saved["model"])
    scheduler.load_state_dict(saved["scheduler"])
    opt.load_state_dict(torch.load(own_file(args.out), weights_only=True))

numbers = torch.arange(len(Examples())).view(STEPS, ACCUMULATE, world, -1)
for step in range(opt.steps, args.stop_after):
    for part in range(ACCUMULATE):
        batch = torch.utils.data.default_collate([Examples()[int(i)] for i in numbers[step, part, rank]])
        with nullcontext() if part == ACCUMULATE - 1 else model.no_sync():
            loss = (model(batch["x"].to(device)) - batch["labels"].to(device)).square().mean() / ACCUMULATE
            loss.backward()
    opt.step()
    opt.zero_grad()
    scheduler.step()

torch.save(opt.state_dict(), own_file(args.out))
if rank == 0:
    torch.save({"model": model.state_dict(), "scheduler": scheduler.state_dict()}, common)
report(args.out, model, opt, scheduler.get_last_lr()[0])
dist.barrier()
dist.destroy_process_group()
