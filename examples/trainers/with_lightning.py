"""Lightning: the optimizer is made in `configure_optimizers`, and communicates from `on_train_start` on.

torchrun --standalone --nproc-per-node 2 examples/trainers/with_lightning.py --out out
"""

import os
from functools import partial

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from data import ACCUMULATE, FREEZE, STEPS, Examples, arguments, network, own_file, report
from pytorch_lightning.strategies import DDPStrategy

import fn
from fn.adapters.ddp import bucketed, overlap

args = arguments()
EPOCH = 4  # steps; Lightning restarts at the start of an epoch


class Regression(lightning.LightningModule):
    """The network and its training."""

    def __init__(self) -> None:
        """Start from the common network."""
        super().__init__()
        self.net = network()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        return (self.net(batch["x"]) - batch["labels"]).square().mean()

    def configure_optimizers(self) -> dict:
        """Return the optimizer over the process group that Lightning has opened."""
        with fn.bind({"data": dist.group.WORLD}):
            make = partial(fn.onebit_adam, axis="data")
            groups = bucketed(self.parameters())
            self.opt = fn.Optimizer(groups, make, schedule=fn.freeze_after(FREEZE), lr=1e-2, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.1, STEPS)
        return {"optimizer": self.opt, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Take the communication over from DDP; on a restart, take this rank's own errors back."""
        overlap(self.trainer.strategy.model, self.opt)
        if args.resume:
            self.opt.load_state_dict(torch.load(own_file(args.out), weights_only=True))


model = Regression()
trainer = lightning.Trainer(
    accelerator="cpu" if args.device == "cpu" else "auto",
    devices=2,
    strategy=DDPStrategy(process_group_backend=args.backend),
    max_epochs=args.stop_after // EPOCH,
    limit_train_batches=EPOCH * ACCUMULATE,
    accumulate_grad_batches=ACCUMULATE,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
checkpoint = os.path.join(args.out, "lightning.ckpt")
loader = torch.utils.data.DataLoader(Examples(), batch_size=4)
trainer.fit(model, loader, ckpt_path=checkpoint if args.resume else None)
trainer.save_checkpoint(checkpoint)
torch.save(model.opt.state_dict(), own_file(args.out))
report(args.out, model, model.opt, model.scheduler.get_last_lr()[0])
dist.barrier()
dist.destroy_process_group()
