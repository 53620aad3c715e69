"""Steps that begin before the backward pass has ended.

A unit is staged without side effects, so it can be staged as soon as its gradients are there, kept aside, and thrown
away if the step never comes. `Overlap` stages units, on threads of its own, while gradients of others are still
computed; the optimizer's step writes the results. Nothing changes before that.

`fn.adapters.ddp.backward_pass` tells `Overlap` of a pass, and `fn.adapters.optim.core.take` calls `Overlap.ahead`,
which sends what the pass held back. So each pass sends all units, in one order, whatever it came to on this rank. A
learning rate or a state that was changed between backward and step begins another pass, in the step. Gradients that
were changed are refused: which of them the others were sent nobody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.ddp.backward_pass import BackwardPass, Threads, leaving_order
from fn.adapters.optim.core import device_of, stage_group, updates_of
from fn.adapters.optim.gradients import unscaled
from fn.adapters.optim.optimizer import Optimizer
from fn.base import Phase, Round
from fn.collectives.agreement import gather_values
from fn.collectives.axis import Binding
from fn.collectives.profiling import Watchers, watched_by
from fn.inplace.protocol import Staged, wait_for_flags
from fn.kernels.flags import temporarily

logger = logging.getLogger("fn")


class Overlap:
    """The communication behind the backward passes of one model for one optimizer. Made by `fn.adapters.ddp.overlap`.

    Args:
        params: of the model, in its order. optimizer: whose steps are taken ahead; a unit, a param group, travels at a
            time. bindings: its axis, on process groups that nothing else uses, one for each thread.
        scaler: what the loss is scaled by, if it is. rate: seconds per byte on the wire. least: seconds on the wire
            below which a phase is not overlapped.
    """

    def __init__(
        self, params: list[Tensor], optimizer: Optimizer, bindings: Sequence[Binding], scaler: Any, rate: float,
        least: float,
    ):  # fmt: skip
        self._optimizer, self._scaler = optimizer, scaler
        self._order = leaving_order([group["params"] for group in optimizer.param_groups], params)
        self._changes = Changes(optimizer)
        self.maker = "overlap"
        """The function that the user called: what errors advise to change."""
        self._threads = Threads(bindings, params[0].device)
        self._rate, self._least = rate, least
        self._axis = next(iter(bindings[0].axes))
        self._is_first = all(int(axis.rank) == 0 for axis in bindings[0].axes.values())
        self.bytes: dict[Phase, int] = {}
        """Bytes that a rank sends in a step of each phase, once one was overlapped; of ranks that differ, the most."""
        self.is_paused = False
        self._phase, self._pass = Phase.LOCAL, None
        self._scaling: tuple[Any, Any] = None, None
        """The loss scale of the gradients that leave, and whether an Inf was found in them."""

    _pass: BackwardPass | None
    """The backward pass whose gradients are sent as they arrive; None where they are left to the step."""

    def no_sync(self) -> AbstractContextManager[bool]:
        """Let backward passes only add to the gradients; the first one outside sends their sums.

        As DDP's, which a model in DDP goes on using.
        """
        return temporarily(self, "is_paused", True)

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
        core = self._optimizer
        with self._threads.falling_silent():
            self._forget()
            core.follow_groups()
            phase = core.next_phase
            if not isinstance(phase, Phase) or not self._threads:  # a round sends nothing in its local step
                return None
            self._phase = phase
            if self.is_on(phase):
                with core.binding:
                    updates_of(core, phase)  # here, for the threads would each make them
                # Param groups that were added behind `overlap` leave last.
                order = [*self._order, *range(len(self._order), len(core.units))]
                buckets = [group["params"] for group in core.param_groups]
                self._pass = BackwardPass(self._threads, buckets, order, self._job_of)
                # At the beginning of the pass: jobs may leave at once, and are computed with what is set now.
                self._changes.note_settings()
                self._scaling = None if self._scaler is None else self._scaler.get_scale(), None
        return self._pass

    def on_last(self) -> None:
        """Leave what is held back to the step: DDP does not announce every gradient that may still come."""

    def on_sent(self) -> None:
        """Leave results and errors to the optimizer's step."""

    def on_end(self) -> None:
        """Note what gradients a backward pass has left."""
        if self._phase is not Phase.LOCAL:  # nobody asks
            self._changes.note_gradients()

    def _forget(self) -> None:
        """Be as before a backward pass, when all that the others wait for is sent."""
        ended, self._pass = self._pass, None
        self._changes.forget()
        if ended is not None:
            ended.end()  # in the phase of the pass: a job of another one fails, and may keep others from sending
            ended.wait()
        self._phase, self._scaling = Phase.LOCAL, (None, None)

    def _job_of(self, unit: int, grads: list[Tensor]) -> Callable[[], Staged]:
        """Return a function that stages the step of a unit."""
        core, phase, scaling = self._optimizer, self._phase, self._scaling

        def stage() -> Staged:
            return stage_group(core, unit, phase, core.units[unit].tree_of(unscaled([grads], *scaling)))

        return stage

    def ahead(self, phase: Phase | Round) -> None:
        """Fill `staged` of the optimizer with the units of its step, where the phase is overlapped.

        Raises: ValueError if the gradients were changed since the backward pass, or the loss is scaled and nobody said
            so; what was raised while communicating.
        """
        if not isinstance(phase, Phase) or phase is Phase.LOCAL or not self._threads:
            self._changes.forget()
            return
        core, steps = self._optimizer, list[Staged]()
        with self._threads.falling_silent():
            if self._scaler is None and hasattr(core, "found_inf"):
                text = f"scales the loss, but {self.maker} does not know it; pass {self.maker}(..., scaler=scaler)"
                raise ValueError(f"scaler: {text}")
            unchanged, error = self._changes.of_gradients(self._scaling[0], self.maker)
            if self.is_on(phase):
                if self._pass is None or phase is not self._phase or self._changes.settings_differ():
                    self.begin()
                steps = self._results(phase)
            # One wait for all: whether the numbers of each unit are finite, and whether the gradients are as they were.
            *steps, compared = wait_for_flags([*steps, Staged(unchanged, lambda: None)])
            if not compared.ok:
                raise error()
        core.staged.update(enumerate(steps))

    def _results(self, phase: Phase) -> list[Staged]:
        """Send what the pass has held back, wait, and return the steps of all units."""
        running, self._pass, core = self._pass, None, self._optimizer
        assert running is not None
        # What is still to be sent is read from p.grad now, when the scaler may have unscaled it or found an Inf.
        self._scaling = getattr(core, "grad_scale", None), getattr(core, "found_inf", None)
        rest = [(p, grad) for p in running.held_back() if (grad := p.grad) is not None]
        running.arrive([p for p, _ in rest], [grad for _, grad in rest])
        running.end()
        steps: list[Staged] = running.results()
        self._threads.catch_up()
        if phase not in self.bytes:
            with watched_by(Watchers()):  # no ledger counts it
                self.bytes[phase] = max(gather_values(running.bytes, self._axis, device_of(core)))
            self._say(phase)
        return steps

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
        self._forget()
        if self._optimizer.ahead == self.ahead:
            self._optimizer.ahead = None
        self._threads.close()


SAMPLES = 64
"""Elements of each gradient by which changes are noticed: one that every element shares, or every other one."""


class Changes:
    """Tells a step whether settings, or gradients, have changed since its backward pass.

    Args: optimizer: whose step it is.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self.forget()

    def forget(self) -> None:
        """Start anew, with another backward pass."""
        self._settings: list[Any] = []
        self._left: list[Tensor] = []  # some elements of each param group's gradients

    def note_settings(self) -> None:
        """Note hyper-parameters and state at the beginning of a pass."""
        self._settings = self._read_settings()

    def note_gradients(self) -> None:
        """Note what gradients a pass has left, once nobody but the user changes them any more."""
        self._left = self._sampled()

    def settings_differ(self) -> bool:
        """Tell whether hyper-parameters or state are others than those that were noted."""
        return self._read_settings() != self._settings

    def of_gradients(self, scale: float | None, maker: str) -> tuple[bool | Tensor, Callable[[], ValueError]]:
        """Return whether gradients are those that were noted, and what is wrong if they are not; asked once for a pass.

        The former is a flag of the device, 0-d, where the gradients are there. Args: scale: of the loss, by which
        `GradScaler.unscale_` may have divided them. maker: the function that the user called.
        """
        core, left = self._optimizer, self._left
        # Asked once: the next step, without a pass before it, has nothing to compare with.
        now, self._left = self._sampled()[: len(left)] if left else [], []
        unscaled = hasattr(core, "found_inf") and getattr(core, "grad_scale", None) is None
        factor = 1.0 / scale if unscaled and scale else 1.0

        def error() -> ValueError:
            pairs = enumerate(zip(now, left, strict=True))
            changed = next(g for g, pair in pairs if not _near(pair[:1], pair[1:], factor))
            clips = "fn.Optimizer(..., max_norm=...) and keep_local(model) in place of overlap"
            clips = clips if maker == "overlap" else f"{maker}(..., max_norm=...)"
            return ValueError(
                f"gradients of param group {changed}: expected those that backward left, from which the step is taken, "
                f"but they were changed between backward and step; leave out what changes them, clip_grad_norm_ or a "
                f"trainer's max_grad_norm perhaps, and clip with {clips}; torch.nn.utils.get_total_norm only reads"
            )

        # Where nothing was noted all is sent in the step. Where the phase is not overlapped nobody noted the scale.
        is_unknown = not left or (unscaled and scale is None)
        return is_unknown or _near(now, left, factor), error

    def _read_settings(self) -> list[Any]:
        units = self._optimizer.units
        # By version: to read a rate on a device would be to wait for it in each step.
        rates = [float(x) if x.device.type == "cpu" else x._version for unit in units for x in unit.rates]
        states = [(id(x), x._version) for unit in units for x in tree.leaves(unit.state)]
        return [rates, states, [id(unit.transform) for unit in units]]

    def _sampled(self) -> list[Tensor]:
        return [_sample(group["params"]) for group in self._optimizer.param_groups]


@torch.no_grad()
def _sample(params: Sequence[Tensor]) -> Tensor:
    """Return evenly spaced elements of each gradient; zeros (expanded, not allocated) where there is none."""
    # (1,) -> (n,), without memory.
    grads = [p.new_zeros(1).expand(p.numel()) if p.grad is None else p.grad for p in params if p.numel()]
    # (...) -> (n,) -> (at most SAMPLES,).
    flat = [g.reshape(-1)[:: -(-g.numel() // SAMPLES)] for g in grads]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float32, device="cpu")


def _near(now: Sequence[Tensor], before: Sequence[Tensor], factor: float) -> Tensor:
    """Return whether samples are `factor` times what they were, but for rounding; 0-d, on the device of the first."""
    ours, theirs = map(_end_to_end, (now, before))
    # `unscale_` rounds its quotients; what nobody divided has to be the same in every bit.
    tolerance = 0.0 if factor == 1.0 else 1e-3
    return torch.isclose(ours, theirs * factor, rtol=tolerance, atol=0.0, equal_nan=True).all()


def _end_to_end(samples: Sequence[Tensor]) -> Tensor:
    """Return samples as one vector, in float64, or in float32 on a device, which may have no float64."""
    device = next((x.device for x in samples if x.numel()), samples[0].device)
    x = torch.cat([x.to(device) for x in samples])  # (groups * samples,)
    return x.to(torch.float64 if device.type == "cpu" else torch.promote_types(x.dtype, torch.float32))
