"""transformers: `Trainer(optimizers=...)`, and a callback that tells DDP to leave gradients alone.

torchrun --standalone --nproc-per-node 2 examples/trainers/with_transformers.py --out out
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from data import ACCUMULATE, FREEZE, STEPS, Examples, arguments, network, own_file, report
from transformers import Trainer, TrainerCallback, TrainingArguments

import fn
from fn.adapters import check_max_grad_norm
from fn.adapters.ddp import bucketed, overlap


class Regression(torch.nn.Module):
    """The network with the loss inside, as `Trainer` wants it."""

    def __init__(self) -> None:
        """Start from the common network."""
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.net(x) - labels).square().mean()}


class Communicate(TrainerCallback):
    """Overlap once the model is wrapped, and keep each rank's own optimizer in each of the trainer's checkpoints."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Take the communication over from DDP, once: it keeps its wrapper if `train` is called again."""
        check_max_grad_norm(args.max_grad_norm)
        if opt.ahead is None:
            overlap(trainer.model_wrapped, opt)
        if state.global_step:
            opt.load_state_dict(torch.load(self.file(args, state), weights_only=True))

    def on_save(self, args, state, control, **kwargs):
        """Save what differs between ranks."""
        torch.save(opt.state_dict(), self.file(args, state))

    def file(self, args, state):
        """Return where this rank's optimizer of the current step is: it comes and goes with the checkpoint."""
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        os.makedirs(folder, exist_ok=True)  # the rank that writes the rest of it may be later
        return own_file(folder)


args = arguments()
training = TrainingArguments(
    args.out,
    use_cpu=args.device == "cpu",
    ddp_backend=args.backend,
    ddp_find_unused_parameters=False,
    max_steps=STEPS,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=ACCUMULATE,
    max_grad_norm=0.0,  # it would clip by the norm of one rank; fn.Optimizer(max_norm=...) clips by that of all
    save_steps=4,
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
training.device  # noqa: B018  it opens the process group
model = Regression().to(training.device)  # before its optimizer is made
with fn.bind({"data": dist.group.WORLD}):
    make = partial(fn.onebit_adam, axis="data")
    groups = bucketed(model.parameters())
    opt = fn.Optimizer(groups, make, schedule=fn.freeze_after(FREEZE), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)


class Stop(TrainerCallback):
    """Stop early, as an interrupted run does."""

    def on_step_end(self, args, state, control, **kwargs):
        """Stop after the step that was asked for."""
        control.should_training_stop |= state.global_step >= stop_after


stop_after = args.stop_after
trainer = Trainer(
    model, training, train_dataset=Examples(), optimizers=(opt, scheduler), callbacks=[Communicate(), Stop()]
)
trainer.train(resume_from_checkpoint=os.path.join(args.out, "checkpoint-4") if args.resume else None)
report(args.out, model, opt, scheduler.get_last_lr()[0])
dist.barrier()
dist.destroy_process_group()
