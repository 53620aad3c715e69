"""transformers.Trainer with an optimizer of `fn`, or with its own optimizer and gradients in codes.

    pair = hf.factory(fn.muloco, lr=0.02, schedule=fn.every(30), codec=fn.int8())
    trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=pair)
    trainer.add_callback(hf.Callback(trainer))
    trainer.train()

Tested with transformers 5.24 and accelerate 1.15.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fn.adapters import ddp
from fn.adapters.agreed_params import agreed_params
from fn.adapters.optim.groups import check_make
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.trainers import ranks
from fn.arguments import checked
from fn.base import Transform
from fn.collectives.axis import ranks_around
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.integer import int4
from fn.collectives.feedback import Feedback, damped
from fn.collectives.ledger import Ledger
from fn.errors import expected
from fn.schedules import Schedule

__all__ = ["Callback", "average_gradients", "factory"]


@checked("schedule", "lr")
def factory(
    make: Callable[..., Transform], *, lr: float | Tensor, schedule: Schedule | None = None, **numbers: Any
) -> tuple[Factory, dict[str, Any]]:
    """Return the pair with which a Trainer makes an optimizer of `fn`, its argument optimizer_cls_and_kwargs.

    Args:
        make: a named optimizer, such as `fn.muloco`; it is given axis="data" for all ranks, and if it takes labels, as
            `fn.muon` does, those of `fn.labels_of(model)`.
        lr: the learning rate, in place of TrainingArguments(learning_rate=); the Trainer's scheduler multiplies it.
        schedule: step -> Phase or Round, steps as the Trainer counts them. None: always warm-up.
        **numbers: max_norm, weight_decay and whatever else `fn.Optimizer` and make take.

    >>> import fn
    >>> optimizer_cls_and_kwargs = factory(fn.diloco, lr=4e-4, schedule=fn.every(30), codec=fn.int8())
    """
    return Factory(check_make(make, "fn.muloco")), {"lr": lr, "schedule": schedule, **numbers}


class Factory(NamedTuple):
    """What `factory` returns: called without arguments, as the Trainer does, it returns what makes the optimizer."""

    make: Callable[..., Transform]
    callback: Callback | None = None

    def __call__(self) -> Callable[..., Optimizer]:
        """Return a function of the model and the numbers."""
        return self.optimizer

    def optimizer(self, model: nn.Module, **options: Any) -> Optimizer:
        """Make the optimizer of a model that is not wrapped yet."""
        added = self.callback is not None and self.callback in self.callback.trainer.callback_handler.callbacks
        if ranks_around() > 1 and not added:
            cure = "trainer.add_callback(hf.Callback(trainer)) before trainer.train()"
            raise ValueError(expected("trainer", "an fn.adapters.trainers.hf.Callback", "none", cure))
        opt = ranks.optimizer_of(model, self.make, options)
        if self.callback is not None:
            self.callback.opt, self.callback.sent = opt, ranks.counting(opt)
        return opt


class _Callback(ABC):
    """A TrainerCallback, whose class is made when the first one is: transformers is imported by then."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        from transformers import TrainerCallback

        return object.__new__(type(cls.__name__, (cls, TrainerCallback), {}))

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        ranks.refuse(("deepspeed", "None", args.deepspeed, ranks.DEEPSPEED), ("fsdp", "None", args.fsdp, ranks.SHARDS))
        self.trainer = trainer
        # The Trainer has no event for these two that knows the folder.
        trainer._save_optimizer_and_scheduler = self._around(trainer._save_optimizer_and_scheduler, self.saving)
        trainer._load_optimizer_and_scheduler = self._around(trainer._load_optimizer_and_scheduler, self.loading)

    @abstractmethod
    def saving(self, folder: str) -> Any:
        """Save this rank's own."""

    @abstractmethod
    def loading(self, checkpoint: str | None) -> Any:
        """Prepare for what the Trainer loads."""

    def _around(self, method: Callable[..., Any], context: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the trainer that runs in a context, which is made of its arguments."""

        @functools.wraps(method)
        def call_in_context(*args: Any, **options: Any) -> Any:
            with context(*args):
                return method(*args, **options)

        return call_in_context


class Callback(_Callback):
    """Let a Trainer train with the optimizer of `factory`.

        trainer.add_callback(hf.Callback(trainer))

    DDP then sends nothing. max_grad_norm and weight_decay of the Trainer become the optimizer's. Each rank's state
    is saved in the checkpoint, and resume_from_checkpoint continues bit for bit. evaluate, predict, save_model
    and the model after train have the params that all ranks agree on. The log has the bytes that rank 0 sent so far,
    and the steps that were skipped for a NaN or Inf.

    Args: trainer: a transformers.Trainer with optimizer_cls_and_kwargs=hf.factory(...).
    Raises: TypeError without that; ValueError, with the cure, for deepspeed, fsdp, find_unused_parameters, fp16 with
        local steps, and for a number that is given twice.
    """

    def __init__(self, trainer: Any) -> None:
        given: tuple[Any, dict[str, Any]] = trainer.optimizer_cls_and_kwargs or (None, {})
        made_by, numbers = given[0], dict(given[1])
        if not isinstance(made_by, Factory):
            wanted, got = "optimizer_cls_and_kwargs=hf.factory(...)", type(made_by).__name__
            raise TypeError(expected("trainer", wanted, got, "hf.average_gradients keeps the Trainer's optimizer"))
        super().__init__(trainer)
        self.opt: Any = None
        self.sent = Ledger()
        args, self.local = trainer.args, ranks.has_local_steps(numbers["schedule"])
        ranks.refuse(
            ("ddp_find_unused_parameters", "False", args.ddp_find_unused_parameters, ranks.UNUSED),
            ("fp16", "False with local steps", args.fp16 and self.local, ranks.SCALING),
        )
        default = {field.name: field.default for field in dataclasses.fields(args)}
        for name in ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon"):
            if getattr(args, name) != default[name]:
                cure = "give it to hf.factory, for the Trainer hands none of its optimizer's numbers over"
                raise ValueError(expected(name, f"its default, {default[name]}", f"{getattr(args, name)}", cure))
        for name, ours in (("max_grad_norm", "max_norm"), ("weight_decay", "weight_decay")):
            number = getattr(args, name)
            if ours in numbers and number not in (default[name], 0.0, numbers[ours]):
                text = f"{ours}={numbers[ours]} of hf.factory or {name}={number} of the Trainer"
                raise ValueError(expected(name, text, "both", "give one of them"))
            if ours not in numbers and number:
                numbers[ours] = number
                ranks.say(f"{name}: the Trainer's {number} is {ours} of the optimizer; the Trainer's own is set to 0")
            setattr(args, name, 0.0)
        if self.local and args.average_tokens_across_devices:
            args.average_tokens_across_devices = False
            ranks.say("average_tokens_across_devices: is switched off, for ranks would meet in each local step")
        # The Trainer's default for its own models, with which DDP asks all ranks in each step.
        trainer.accelerator.ddp_handler.find_unused_parameters = False
        trainer.optimizer_cls_and_kwargs = made_by._replace(callback=self), numbers
        trainer.log = self._logging(trainer.log)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._around(getattr(trainer, name), self.agreed))

    def on_train_begin(self, *args: Any, **given: Any) -> None:
        """Let DDP leave gradients alone, and the scheduler rest where a step is left out."""
        ranks.keep_to_itself(self.trainer.model_wrapped, local=self.local)
        ranks.tell_of_skips(self.trainer.optimizer, self.opt)

    def on_train_end(self, args: Any, state: Any, *others: Any, **given: Any) -> None:
        """Leave the model with the params that all ranks agree on, unless it is the best one of the run."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            ranks.load_agreed(self.opt, self.trainer.model)

    def agreed(self, *args: Any) -> Any:
        """Return the context in which the model is evaluated and saved."""
        if self.opt is None or not self.trainer.is_in_train:
            return nullcontext()
        return agreed_params(self.opt, self.trainer.model)

    def loading(self, checkpoint: str | None) -> Any:
        """Load this rank's optimizer where the Trainer loads rank 0's."""
        ranks.restore_instead(checkpoint, self.opt, self.trainer.model)
        return nullcontext()

    def saving(self, folder: str) -> Any:
        """Save this rank's own."""
        ranks.write(folder, ranks.of_rank(self.opt, self.trainer.model))
        return nullcontext()

    def _logging(self, log: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(log)
        def with_bytes(logs: dict[str, float], *args: Any, **options: Any) -> None:
            if "loss" in logs:
                logs |= {"bytes_sent": self.sent.total, "skipped_steps": self.opt.skipped + self.opt.dropped}
            log(logs, *args, **options)

        return with_bytes


def average_gradients(
    trainer: Any, codec: Codec | None = None, feedback: Feedback | None = None, **options: Any
) -> None:
    """Let a Trainer that keeps its optimizer average gradients in codes; call it before trainer.train().

        trainer = Trainer(model, args, train_dataset=data)
        hf.average_gradients(trainer)                               # int4, LoCo's feedback

    The Trainer clips by the norm of the mean, as without it. Each rank's residual errors are saved in the checkpoint.

    Args: trainer: a transformers.Trainer. codec, feedback, **options: as `fn.adapters.ddp.average_gradients` takes
        them; without a codec and an average `fn.int4()` and `fn.damped()`.
    Raises: ValueError, with the cure, for deepspeed and fsdp.
    """
    if codec is None and "average" not in options:
        codec, feedback = int4(), feedback or damped()
    start = functools.partial(ddp.average_gradients, codec=codec, feedback=feedback, **options)
    trainer.add_callback(_Codes(trainer, start))


class _Codes(_Callback):
    """What `average_gradients` adds."""

    def __init__(self, trainer: Any, start: Callable[..., Any]) -> None:
        super().__init__(trainer)
        self.start, self.model, self.mean = start, None, None
        self.folder: str | None = None

    def on_train_begin(self, *args: Any, **given: Any) -> None:
        """Give DDP its hook, once, and the errors of the checkpoint."""
        model = self.trainer.model_wrapped
        if ranks_around() > 1 and model is not self.model:
            self.model, self.mean = model, self.start(model, scaler=self.trainer.accelerator.scaler)
        if self.mean is not None and self.folder is not None:
            files = Path(self.folder).glob("fn-0-rank-*-of-*.pt")  # of all ranks, for another number of them
            parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
            if parts:
                self.mean.load_state_dict({key: x for part in parts for key, x in part.items()})
            self.folder = None

    def loading(self, checkpoint: str | None) -> Any:
        """Keep in mind where the errors are: DDP has its hook later."""
        self.folder = checkpoint
        return nullcontext()

    def saving(self, folder: str) -> Any:
        """Save this rank's residual errors."""
        if self.mean is not None:
            ranks.write(folder, self.mean.state_dict())
        return nullcontext()
