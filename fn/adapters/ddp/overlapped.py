"""Steps that begin before the backward pass has ended.

An update is a pure function, or staged without side effects, so it can be computed as soon as its gradients are there,
kept aside, and thrown away if the step never comes. `Overlap` stages single param groups, on threads of its own, while
gradients of others are still computed; the optimizer's step writes the results. Nothing changes before that.

In the order of a pass: `grad_hooks` calls `begin`, `arrive` with gradients, `end` and `remember`; the optimizer
calls `ahead` in its step. Three things may go wrong. A rank that cannot take the step as the others do sends NaN, and
all meet in the serial step, which compares (`_problem`). Communication fails: what is left is not sent, and `ahead`
raises that (`_error`). Somebody changes something between backward and step: see `Changes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.ddp.buckets import Arrivals, leaving_order
from fn.adapters.ddp.staleness import Changes
from fn.adapters.optim.gradients import unscaled
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.state_kinds import worker_errors
from fn.base import Phase
from fn.collectives.axis import Binding
from fn.collectives.comm_thread import CommunicationThread
from fn.collectives.ledger import ledger
from fn.collectives.transports.failure_detection import raising_peer_lost
from fn.inplace.protocol import Staged, settled

logger = logging.getLogger("fn")


class Overlap:
    """What runs behind the backward passes of one model for one optimizer. Made by `fn.adapters.ddp.overlap`.

    Args:
        params: of the model, in its order. optimizer: whose steps are taken ahead; a param group travels at a time.
        bindings: its axis, on process groups that nothing else uses, one for each thread. While the codes of one param
            group are on the wire, another thread encodes the next one.
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
        self._threads = [CommunicationThread(binding, params[0].device) for binding in bindings]
        self._rate, self._least, self._alike = rate, least, alike
        self._transports = {name: axis.transport for name, axis in bindings[0].axes.items()}
        self._all_transports = {axis.transport for binding in bindings for axis in binding.axes.values()}
        self._is_first = all(int(axis.rank) == 0 for axis in bindings[0].axes.values())
        self.bytes: dict[Phase, int] = {}
        """What a rank sends in a step of each phase, once one has been taken ahead."""
        self.is_paused = False
        self._arrivals: Arrivals | None = None
        self._jobs: dict[int, Future[Staged]] = {}  # by param group
        self._sent: dict[int, int] = {}
        self._problem: Exception | None = None
        self._error: BaseException | None = None
        self._forget(Phase.LOCAL)

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

    @property
    def is_taking(self) -> bool:
        """Tell whether the gradients of this backward pass are sent as they arrive."""
        return self._arrivals is not None

    def is_on(self, phase: Phase) -> bool:
        """Tell whether steps of a phase are overlapped."""
        if phase is Phase.LOCAL:  # nothing is sent
            return False
        return phase not in self.bytes or self.wire_seconds(phase) >= self._least

    def wire_seconds(self, phase: Phase) -> float:
        """Return how long the messages of a step of a phase are on the wire, by the rate that was measured."""
        return self.bytes[phase] * self._rate

    def begin(self) -> None:
        """Start a backward pass; forget what was taken ahead for a step that never came."""
        optimizer = self._optimizer
        problem = optimizer.training.follow_groups()
        phase = optimizer.training.phase
        self._forget(phase if isinstance(phase, Phase) and self._threads else Phase.LOCAL)  # in rounds nothing is sent
        self._problem = problem
        if not self.is_on(self._phase) or self._has_thawed():
            return
        buckets = [group["params"] for group in optimizer.param_groups]
        self._arrivals = Arrivals(buckets, leaving_order(buckets, self._params))
        self._changes.note_settings()

    def _forget(self, phase: Phase) -> None:
        """Wait for what was submitted, and be as before a backward pass for a step of a phase."""
        for job in self._jobs.values():
            job.exception()  # waits
        self._phase, self._arrivals, self._jobs, self._sent = phase, None, {}, {}
        self._problem = self._error = None
        self._changes.forget()

    def _has_thawed(self) -> bool:
        """Tell whether a parameter needs gradients that did not need them when this was made: nobody reports these."""
        params = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        found = not self._known.issuperset(map(id, params))
        if found and not self._said_thawed and self._is_first:
            logger.warning("overlap is off: parameters were thawed; wrap the model and make its optimizer anew for it")
        self._said_thawed = self._said_thawed or found
        return found

    def arrive(self, params: Iterable[Tensor], grads: Iterable[Tensor]) -> None:
        """Take gradients; send the param groups that they complete."""
        if self._arrivals is not None:
            self._send(self._arrivals.add(params, grads))

    def missing(self) -> list[Tensor]:
        """Return the parameters whose gradients have not come in this backward pass."""
        return [] if self._arrivals is None else self._arrivals.missing()

    def end(self) -> None:
        """End the backward pass: send the param groups that were not complete, zeros for what is missing."""
        if self._arrivals is not None:
            self._send(self._arrivals.rest())

    def remember(self) -> None:
        """Note what gradients a backward pass has left, once nobody but the user changes them any more."""
        if self._phase is not Phase.LOCAL:  # nobody asks
            self._changes.note_gradients()

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call a function, on one of the threads, when all that was submitted has been sent, or has failed."""
        jobs = list(self._jobs.values())

        def wait() -> None:
            for job in jobs:
                job.exception()
            then()

        self._threads[len(jobs) % len(self._threads)].submit(wait)

    def _send(self, groups: Iterable[int]) -> None:
        assert self._arrivals is not None
        for group in groups:
            grads = self._arrivals.grads(group)
            if self._is_unlike(group):  # the others hear of it, and all meet in the step
                grads = [torch.full_like(g, float("nan")) for g in grads]
            thread = self._threads[len(self._jobs) % len(self._threads)]  # in the same order on all ranks
            self._jobs[group] = thread.submit(self._job(group, grads))

    def _is_unlike(self, group: int) -> bool:
        """Tell whether this rank cannot take the step of a param group as the others do."""
        if self._problem is not None:
            return True
        params = self._optimizer.param_groups[group]["params"]
        return not self._alike and self._optimizer.training.gradients.are_others_absent(group, params)

    def _job(self, group: int, grads: list[Tensor]) -> Callable[[], Staged]:
        phase, scale = self._phase, self._changes.scale

        def run() -> Staged:
            if self._error is not None:  # the peers may be gone
                raise self._error
            try:
                # Others may wait for this rank on the groups of the other threads.
                with ledger() as sent, raising_peer_lost(self._transports, self._all_transports):
                    (wide,) = unscaled((grads,), scale, None)
                    found = self._optimizer.stage_group(group, phase, wide)
                self._sent[group] = sent.total
            except BaseException as error:
                self._error = error
                raise
            return found

        return run

    def ahead(self, phase: Phase) -> tuple[list[Staged] | None, ValueError | None]:
        """Return the step whose backward pass is over, a part per param group, and an error if gradients changed since.

        The step is None if it was not taken ahead, or its pass broke off half way, or if all ranks have to meet in it:
        a number is not finite, or a rank cannot take it. Then the ranks can agree on the error. A step that was taken
        is to be written all the same, before the error is raised: the other ranks, whose gradients may be as they were,
        write it, too.

        Raises: ValueError if hyper-parameters or the state were changed since, or the loss is scaled and nobody said
            so; what was raised while communicating.
        """
        changed = self._changes.of_gradients(self.maker)
        changed = changed if phase is self._phase else None
        self._send_the_rest(phase)
        if not self.is_taking or phase is not self._phase:
            return None, changed
        gradients, groups = self._optimizer.training.gradients, self._optimizer.param_groups
        others_absent = any(gradients.are_others_absent(g, group["params"]) for g, group in enumerate(groups))
        problem = self._changes.of_settings(self.maker)  # while the last codes are on the wire
        jobs, self._jobs, self._arrivals = self._jobs, {}, None
        steps = [jobs[group].result() for group in sorted(jobs)]
        for thread in self._threads:
            thread.catch_up()
        steps = settled(steps)
        if len(steps) < len(groups) or not all(step.ok and step.safe for step in steps):
            return None, changed
        if others_absent:
            return None, changed  # DDP knows on all ranks alike which parameters had no part; the step asks once more
        if problem is not None:
            raise problem
        if phase not in self.bytes:
            self.bytes[phase] = sum(self._sent.values())
            self._say(phase)
        return steps if changed is None else [*steps, Staged(True, self._mend_errors)], changed

    def _send_the_rest(self, phase: Phase) -> None:
        """Send NaN for what the backward pass has not come to on this rank: the others wait, and all meet in the step.

        Of a parameter that was frozen after DDP was made, on this rank only perhaps, DDP says nothing; of none at all
        if its bucket is the first.
        """
        silent = not self.is_taking and self._alike and self.is_on(phase)
        if silent and not all(p.requires_grad for p in self._params):
            self.begin()
        if self._arrivals is not None and (rest := self._arrivals.rest()):
            self._problem = self._problem or RuntimeError("a part of the backward pass did not come")
            self._send(rest)

    def _mend_errors(self) -> None:
        """Drop errors that are not finite: they may be formed with the step, from gradients as they are then."""
        for leaf in tree.leaves(worker_errors(self._optimizer.states)):
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
        while self._threads:
            self._threads.pop().close()
