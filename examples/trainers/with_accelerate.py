"""accelerate: `prepare` wraps the model in DDP, unless it is alone; from there on the optimizer communicates.

torchrun --standalone --nproc-per-node 2 examples/trainers/with_accelerate.py --out out
"""

import os

import torch
from accelerate import Accelerator
from data import ACCUMULATE, FREEZE, STEPS, Examples, arguments, network, own_file, report

import fn
import fn.adapters.ddp

args = arguments()
accelerator = Accelerator(cpu=args.device == "cpu", gradient_accumulation_steps=ACCUMULATE)
model, loader = accelerator.prepare(network(), torch.utils.data.DataLoader(Examples(), batch_size=4))
opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(FREEZE), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS * accelerator.num_processes)
optimizer, scheduler = accelerator.prepare(opt, scheduler)

if args.resume:  # accelerate keeps one rank's optimizer; each rank's own errors are in a file beside it
    accelerator.load_state(os.path.join(args.out, "state"))
    opt.load_state_dict(torch.load(own_file(args.out), weights_only=True))

for batch in accelerator.skip_first_batches(loader, opt.steps * ACCUMULATE):
    with accelerator.accumulate(model):
        loss = (model(batch["x"]) - batch["labels"]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if opt.steps == args.stop_after and accelerator.sync_gradients:
        break

accelerator.save_state(os.path.join(args.out, "state"))
torch.save(opt.state_dict(), own_file(args.out))
report(args.out, model, opt, scheduler.get_last_lr()[0])
accelerator.wait_for_everyone()
accelerator.end_training()
