"""Steps that begin before the backward pass has ended.

An update is a pure function, or staged without side effects, so it can be computed as soon as its gradients are there,
kept aside, and thrown away if the step never comes. `Overlap` stages single param groups, on threads of its own, while
gradients of others are still computed; the optimizer's step writes the results. Nothing changes before that.

`fn.adapters.ddp.backward_pass` tells `Overlap` of a pass, and the optimizer calls `Overlap.ahead` in its step. Three
things may go wrong:

- A rank cannot take the step as the others do. It sends NaN, and all meet in the serial step, which compares.
- Communication fails. What is left is not sent, and `ahead` raises the error.
- Somebody clips gradients, writes a learning rate or loads a state between backward and step, and means the step to
  follow that. But the step is computed already: `Changes` notices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.ddp.backward_pass import BackwardPass, Threads, leaving_order
from fn.adapters.optim.consistency import worker_errors
from fn.adapters.optim.gradients import unscaled
from fn.adapters.optim.optimizer import Optimizer
from fn.base import Phase
from fn.collectives.axis import Binding
from fn.inplace.protocol import Staged, settled

logger = logging.getLogger("fn")


class Overlap:
    """What runs behind the backward passes of one model for one optimizer. Made by `fn.adapters.ddp.overlap`.

    Args:
        params: of the model, in its order. optimizer: whose steps are taken ahead; a param group travels at a time.
        bindings: its axis, on process groups that nothing else uses, one for each thread.
        scaler: what the loss is scaled by, if it is. rate: seconds per byte on the wire. least: seconds on the wire
            below which a phase is not overlapped. alike: all ranks know which parameters had no part in a backward
            pass, as they do under DDP.
    """

    def __init__(
        self,
        params: list[Tensor],
        optimizer: Optimizer,
        bindings: Sequence[Binding],
        scaler: Any,
        rate: float,
        least: float,
        alike: bool,
    ):
        self._params, self._optimizer = params, optimizer
        self._known, self._said_thawed = {*map(id, params)}, False
        self._changes = Changes(optimizer, scaler)
        self.maker = "overlap"
        """The function that the user called: what errors advise to change."""
        self._threads = Threads(bindings, params[0].device)
        self._rate, self._least, self._alike = rate, least, alike
        self._is_first = all(int(axis.rank) == 0 for axis in bindings[0].axes.values())
        self.bytes: dict[Phase, int] = {}
        """What a rank sends in a step of each phase, once one has been taken ahead."""
        self.is_paused = False
        self._phase, self._pass = Phase.LOCAL, None
        self._problem: Exception | None = None
        """Why this rank cannot take the step as the others do."""

    _pass: BackwardPass | None
    """The backward pass whose gradients are sent as they arrive; None where they are left to the step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes only add to the gradients; the first one outside sends their sums.

        As DDP's, which a model in DDP goes on using.
        """
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def is_on(self, phase: Phase) -> bool:
        """Tell whether steps of a phase are overlapped."""
        if phase is Phase.LOCAL:  # nothing is sent
            return False
        return phase not in self.bytes or self.wire_seconds(phase) >= self._least

    def wire_seconds(self, phase: Phase) -> float:
        """Return how long the messages of a step of a phase are on the wire, by the rate that was measured."""
        return self.bytes[phase] * self._rate

    def begin(self) -> BackwardPass | None:
        """Begin a backward pass; forget what was taken ahead for a step that never came."""
        optimizer = self._optimizer
        problem = optimizer.training.follow_groups()
        phase = optimizer.training.phase
        self._forget(phase if isinstance(phase, Phase) and self._threads else Phase.LOCAL)  # in rounds nothing is sent
        self._problem = problem
        if phase is not Phase.COMPRESSED:
            optimizer.training.keep_momentum(phase)
        if self.is_on(self._phase) and not self._has_thawed():
            buckets = [group["params"] for group in optimizer.param_groups]
            self._pass = BackwardPass(self._threads, buckets, leaving_order(buckets, self._params), self._job_of)
            self._changes.note_settings()
        return self._pass

    def on_sent(self) -> None:
        """Leave results and errors to the optimizer's step."""

    def on_end(self) -> None:
        """Note what gradients a backward pass has left."""
        if self._phase is not Phase.LOCAL:  # nobody asks
            self._changes.note_gradients()

    def _forget(self, phase: Phase) -> None:
        """Wait for what was submitted, and be as before a backward pass for a step of a phase."""
        if self._pass is not None:
            self._pass.wait()
        self._phase, self._pass, self._problem = phase, None, None
        self._changes.forget()

    def _has_thawed(self) -> bool:
        """Tell whether a parameter needs gradients that did not need them when this was made: nobody reports these."""
        params = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        has_thawed = not self._known.issuperset(map(id, params))
        if has_thawed and not self._said_thawed and self._is_first:
            logger.warning("overlap is off: parameters were thawed; wrap the model and make its optimizer anew for it")
        self._said_thawed = self._said_thawed or has_thawed
        return has_thawed

    def _job_of(self, group: int, grads: list[Tensor]) -> Callable[[], Staged]:
        """Return what stages the step of a param group, from NaN if this rank cannot take it as the others do."""
        phase, scale, training = self._phase, self._changes.scale, self._optimizer.training
        params = self._optimizer.param_groups[group]["params"]
        is_unlike = not self._alike and training.gradients.are_others_absent(group, params)
        if self._problem is not None or is_unlike:  # the others hear of it, and all meet in the step
            grads = [torch.full_like(g, float("nan")) for g in grads]

        def stage() -> Staged:
            (wide,) = unscaled((grads,), scale, None)
            return self._optimizer.stage_group(group, phase, wide)

        return stage

    def ahead(self, phase: Phase) -> tuple[list[Staged] | None, ValueError | None]:
        """Return the step whose backward pass is over, a part per param group, and an error if gradients changed since.

        The step is None if it was not taken ahead, or its pass broke off half way, or if all ranks have to meet in it:
        a number is not finite, or a rank cannot take it. Then the ranks can agree on the error. A step that was taken
        is to be written all the same, before the error is raised: the other ranks, whose gradients may be as they were,
        write it, too.

        Raises: ValueError if hyper-parameters or the state were changed since, or the loss is scaled and nobody said
            so; what was raised while communicating.
        """
        is_of_pass = phase is self._phase
        unchanged, error_of = self._changes.of_gradients(self.maker)
        self._send_the_rest(phase)
        if self._pass is None or phase is not self._phase:
            return None, None if unchanged or not is_of_pass else error_of()
        gradients, groups = self._optimizer.training.gradients, self._optimizer.param_groups
        others_absent = any(gradients.are_others_absent(g, group["params"]) for g, group in enumerate(groups))
        problem = self._changes.of_settings(self.maker)  # while the last codes are on the wire
        ended, self._pass = self._pass, None
        steps = ended.results()
        self._threads.catch_up()
        # One wait for all: whether the numbers of each step are finite, and whether the gradients are as they were.
        *steps, compared = settled([*steps, Staged(unchanged, lambda: None)])
        changed = None if compared.ok or not is_of_pass else error_of()
        if len(steps) < len(groups) or not all(step.ok and step.safe for step in steps):
            return None, changed
        if others_absent:
            return None, changed  # DDP knows on all ranks alike which parameters had no part; the step asks once more
        if problem is not None:
            raise problem
        if phase not in self.bytes:
            self.bytes[phase] = ended.bytes
            self._say(phase)
        return steps if changed is None else [*steps, Staged(True, self._mend_errors)], changed

    def _send_the_rest(self, phase: Phase) -> None:
        """Send NaN for what the backward pass has not come to on this rank: the others wait, and all meet in the step.

        Of a parameter that was frozen after DDP was made, on this rank only perhaps, DDP says nothing; of none at all
        if its bucket is the first.
        """
        is_silent = self._pass is None and self._alike and self.is_on(phase)
        if is_silent and not all(p.requires_grad for p in self._params):
            self.begin()
        if self._pass is not None and not self._pass.has_left():
            self._problem = self._problem or RuntimeError("a part of the backward pass did not come")
            self._pass.end()

    def _mend_errors(self) -> None:
        """Drop errors that are not finite: they may be formed with the step, from gradients as they are then."""
        for leaf in tree.leaves(worker_errors(self._optimizer.training.states)):
            if leaf.is_floating_point():
                leaf.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _say(self, phase: Phase) -> None:
        seconds, size = self.wire_seconds(phase), self.bytes[phase]
        text = "overlap is %s in the %s phase: %d bytes per step are about %.1f ms on the wire; worth it from %.1f ms"
        state = "on" if self.is_on(phase) else "off"
        level = logging.WARNING if state == "off" and self._is_first else logging.INFO
        logger.log(level, text, state, phase.value, size, 1e3 * seconds, 1e3 * self._least)

    def close(self) -> None:
        """End the threads, and give back their process groups; the steps communicate in `step` from now on.

        See `fn.adapters.ddp.close`.
        """
        self._forget(Phase.LOCAL)
        if self._optimizer.training.ahead == self.ahead:
            self._optimizer.training.ahead = None
        self._threads.close()


SAMPLES = 64
"""Elements of each gradient by which changes are noticed: one that every element shares, or every other one."""


class Changes:
    """Tells a step what is different from what its backward pass was run with, and from what that has left.

    Args: optimizer: whose step it is. scaler: what the loss is scaled by, if it is.
    """

    def __init__(self, optimizer: Optimizer, scaler: Any):
        self._optimizer, self._scaler = optimizer, scaler
        self.forget()

    def forget(self) -> None:
        """Start anew, with another backward pass."""
        self.scale: float | None = None
        """What the loss of the pass is scaled by, once its settings are noted."""
        self._settings: list[Any] = []
        self._left: list[Tensor] = []  # some elements of each param group's gradients

    def note_settings(self) -> None:
        """Note hyper-parameters and state at the beginning of a pass."""
        self.scale = None if self._scaler is None else self._scaler.get_scale()
        self._settings = self._read_settings()

    def note_gradients(self) -> None:
        """Note what gradients a pass has left, once nobody but the user changes them any more."""
        self._left = self._sampled()

    def of_settings(self, maker: str) -> ValueError | None:
        """Return what is wrong if hyper-parameters or state are others than those that were noted.

        Args: maker: the function that the user called.
        """
        if self._read_settings() != self._settings:
            text = "param_groups or state: changed between backward and step, but the step was taken behind backward"
            return ValueError(text)
        if self._scaler is None and hasattr(self._optimizer, "found_inf"):
            text = f"scales the loss, but {maker} does not know it; pass {maker}(..., scaler=scaler)"
            return ValueError(f"scaler: {text}")
        return None

    def of_gradients(self, maker: str) -> tuple[bool | Tensor, Callable[[], ValueError | None]]:
        """Return whether gradients are those that were noted, and what is wrong if they are not; asked once for a pass.

        The former is a flag of the device, 0-d, where the gradients are there. Args: maker: the function that the user
        called.
        """
        left, self._left = self._left, []
        by_scaler = self._scaler is not None or hasattr(self._optimizer, "found_inf")
        unscaled = by_scaler and getattr(self._optimizer, "grad_scale", None) is None
        factor = 1.0 / self.scale if unscaled and self.scale else 1.0
        # Where nothing was noted, or a group came since, all is sent in the step. Or it is a scale nobody told us.
        if len(left) != len(self._optimizer.param_groups) or (unscaled and self.scale is None):
            return True, lambda: None
        now = self._sampled()

        def error() -> ValueError:
            pairs = enumerate(zip(now, left, strict=True))
            changed = next(g for g, pair in pairs if not _near(pair[:1], pair[1:], factor))
            clips = "fn.Optimizer(..., max_norm=...) and keep_local(model) in the place of overlap"
            clips = clips if maker == "overlap" else f"{maker}(..., max_norm=...)"
            return ValueError(
                f"gradients of param group {changed}: expected those that backward left, from which the step is taken, "
                f"but they were changed between backward and step; leave out what changes them, clip_grad_norm_ or a "
                f"trainer's max_grad_norm perhaps, and clip with {clips}; torch.nn.utils.get_total_norm only reads"
            )

        return _near(now, left, factor), error

    def _read_settings(self) -> list[Any]:
        training = self._optimizer.training
        tensors = [*training.lrs, *tree.leaves(training.states)]
        return [*((id(x), x._version) for x in tensors), *map(id, training.hypers)]

    def _sampled(self) -> list[Tensor]:
        return [_sample(group["params"]) for group in self._optimizer.param_groups]


@torch.no_grad()
def _sample(params: Sequence[Tensor]) -> Tensor:
    """Return evenly spaced elements of each gradient; zeros where there is none, of which no vector is made."""
    grads = [p.new_zeros(1).expand(p.numel()) if p.grad is None else p.grad for p in params if p.numel()]
    flat = [g.reshape(-1)[:: -(-g.numel() // SAMPLES)] for g in grads]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float32, device="cpu")


def _near(now: Sequence[Tensor], before: Sequence[Tensor], factor: float) -> Tensor:
    """Return whether samples are `factor` times what they were, but for rounding; 0-d, on the device of the first."""
    ours, theirs = map(_end_to_end, (now, before))
    tolerance = 0.0 if factor == 1.0 else 1e-3
    return torch.isclose(ours, theirs * factor, rtol=tolerance, atol=0.0, equal_nan=True).all()


def _end_to_end(samples: Sequence[Tensor]) -> Tensor:
    """Return samples as one vector, in float64, or in float32 on a device, which may have no float64."""
    device = next((x.device for x in samples if x.numel()), samples[0].device)
    x = torch.cat([x.to(device) for x in samples])
    return x.to(torch.float64 if device.type == "cpu" else torch.promote_types(x.dtype, torch.float32))
