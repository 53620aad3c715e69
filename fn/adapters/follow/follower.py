"""`Follower`: has the parameters of a published run after every step, and is no rank of it."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fn.adapters.follow import spare
from fn.adapters.follow.averaged_gradients import MEAN, AveragedGradients, transform_of
from fn.adapters.follow.bits import BITS, change, tensors_of
from fn.adapters.follow.known_answer import check_known_answer
from fn.adapters.follow.log_format import JSON, Data, Frame, Key
from fn.adapters.follow.log_reader import LogReader
from fn.adapters.follow.params_log import PARAMS
from fn.adapters.follow.run import (
    ADDED,
    DIGEST_BYTES,
    DIGESTS,
    LISTS,
    agreed_of,
    digests_of,
    groups_from,
    params_of,
    phase_from,
    settings_of,
    state_of,
)
from fn.adapters.optim.optimizer import Optimizer
from fn.arguments import check_function, checked
from fn.base import Phase, Round, Transform
from fn.collectives.following import Log, echoing
from fn.errors import expected

LOOK = 0.2
"""Seconds between two looks for the next step."""

OnDivergence = Literal["raise", "snapshot"]


class Diverged(RuntimeError):
    """A follower's parameters are others than those of the run. step: behind which; tensor: the first of them."""

    def __init__(self, message: str, *, step: int, tensor: str):
        super().__init__(message)
        self.step, self.tensor = step, tensor


class Follower:
    """Take the steps of a published run, with what its ranks got, and without gradients or process groups.

        for step in fn.adapters.follow.Follower("run", model, make, patience=600):
            evaluate(model)                                             # as behind this step of the run

    It starts from the first snapshot; `to` from the nearest one. Learning rates and other numbers, added groups,
    skipped steps and phases come from the log. Where a trainer was restarted from a step before that which is reached
    here, it goes back.

    In rounds, as of `fn.diloco`, a rank's parameters between exchanges are its own: evaluate what the ranks agree on,
    within `fn.adapters.agreed_params(follower.optimizer, model)`.

    Args:
        source: the folder of the log, or the http or https address where a file server shows it.
        model: shaped like the run's, with its names; its parameters are overwritten.
        make: as the run's optimizer was given. None: for a log of params, which needs none.
        average: where `average_gradients` averages the run's gradients, (axis) -> the transform that does, such as
            `partial(fn.compressed_average, codec=fn.int4(), feedback=fn.damped())`.
        on_divergence: behind a digest that differs: raise, or go on from the next snapshot.
        patience: seconds in which a next step must come, and the log itself; 0: iteration ends with the steps that are
            there.
    Raises: ValueError for a log of another method or model, and on a machine whose steps come to other bits than those
        of the run; as `LogReader` for what is no log. While it steps: `Diverged`; LookupError for a step that is not in
        the log; ValueError for a step that hears something else.
    """

    optimizer: Optimizer

    @checked("source", "model", "make", "patience")
    def __init__(
        self,
        source: str | Path,
        model: nn.Module,
        make: Callable[..., Transform] | None = None,
        *,
        average: Callable[..., Transform] | None = None,
        on_divergence: OnDivergence = "raise",
        patience: float = 0.0,
    ):
        if on_divergence not in ("raise", "snapshot"):
            raise ValueError(expected("on_divergence", "'raise' or 'snapshot'", f"{on_divergence!r}"))
        if average is not None:
            check_function("average", average, "a function of an axis that returns a transform")
        self.model, self.make = model, make
        self.on_divergence, self.patience = on_divergence, patience
        self.steps = 0  # that were taken
        self._span = range(0)  # of the steps of one incarnation, where this is in it
        self._is_there = False  # whether the snapshot of that step is loaded, or the steps behind it were taken
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._reader = self._opened(source)
        self._phase: Phase | Round = Phase.WARMUP
        self._log, self._numbers = Log(reads=True), dict[str, JSON]()
        self._check_header()
        header: Any = self._reader.header
        self._of_mean = header.get("mean")
        self._average = transform_of(self._of_mean, average)

    def __iter__(self) -> Iterator[int]:
        """Take step after step; yield the number of each."""
        while self._wait():
            if not self._is_there and not self.steps:
                self.steps = min(self._reader.snapshots())
            step = self._take()
            if step is not None:
                yield step

    def to(self, step: int) -> None:
        """Go to the parameters behind a step, from where this is or from the nearest snapshot before.

        Raises: LookupError if the log does not have that step; as a step of this.
        """
        self._refresh()
        self._reader.frame(step)  # which raises if it is not there
        snapshots = [s for s in self._reader.snapshots() if s <= step]
        if not snapshots:
            has = ", ".join(map(str, self._reader.snapshots())) or "none"
            raise LookupError(expected("step", "one behind a snapshot", f"{step}, where snapshots are {has}"))
        if not (self._is_there and snapshots[-1] <= self.steps <= step + 1):
            self._go_to(snapshots[-1])
        while self.steps <= step:
            self._take()

    def checkpoint(self, folder: str | Path, load_from: str | Path | None = None) -> Path:
        """Write a checkpoint from which a new world, of any number of ranks, goes on behind the step reached here.

        Take it when the trainers are lost: process groups cannot grow. `fn.adapters.checkpoint.load` reads it.
        Parameters and what ranks agree on are those of the run, bit for bit. What is each rank's own a follower never
        heard. Residual errors begin at zero.

            follower.to(1234)
            follower.checkpoint("spare", load_from="checkpoints")       # in one process
            fn.adapters.checkpoint.load("spare", opt)                   # on all ranks of the new world

        Args:
            folder: of checkpoints, as for `fn.adapters.checkpoint.save`.
            load_from: the folder of the run's own checkpoints, whose newest one has the moments of owners, shards and
                local steps. How old they are is warned of. None: they begin as `init` makes them, with ages zero.
        Returns: the folder of this checkpoint.
        Raises: ValueError before the first step, with a mean on its way, for a run over several axes, and for a
            checkpoint of another optimizer; as `fn.adapters.checkpoint.load` for a damaged one. Nothing is written.
        """
        if self._is_params:
            raise ValueError(expected("follower", "that of a log of codes", "one of params, without an optimizer"))
        if not self._is_there:
            cure = "call to(step) first"
            raise ValueError(expected("follower", "at a step of the run", "one that took none", cure))
        return spare.write(self.optimizer, Path(folder), None if load_from is None else Path(load_from))

    def _check_header(self) -> None:
        header = self._reader.header
        self._is_params = header["method"] == PARAMS
        if self._is_params:
            return
        if self.make is None:
            raise ValueError(expected("make", "that of the run, whose log has codes", "None"))
        if header.get("settings") != (own := settings_of(self.make)):
            theirs = header.get("settings") or {}
            assert isinstance(theirs, dict)
            name = next(k for k in {**theirs, **own} if theirs.get(k) != own.get(k))
            got = f"{own.get(name)!r}"
            raise ValueError(expected("make", f"that of the run, whose {name} is {theirs.get(name)!r}", got))
        dtypes: Any = header["dtypes"]
        shapes: Any = header["shapes"]
        params = [p for p in self.model.parameters() if p.requires_grad]
        own_forms = sorted((str(p.dtype).removeprefix("torch."), [*p.shape]) for p in params)
        forms = sorted(zip(dtypes, shapes, strict=True))
        if any(form not in own_forms for form in forms):
            missing = next(form for form in forms if form not in own_forms)
            raise ValueError(expected("model", f"a parameter {missing[0]} {missing[1]}, as the run has", "none"))
        check_known_answer(header, self.make, params[0].device, self._reader.head)

    def _held(self) -> dict[str, Tensor]:
        """Return what travels as bits: of a log of codes the buffers alone."""
        buffers = bool(self._reader.header.get("buffers"))
        return tensors_of(self.model, params=self._is_params, buffers=buffers)

    def _opened(self, source: str | Path) -> LogReader:
        """Return the log, as soon as the run has begun it."""
        until = time.monotonic() + self.patience
        while True:
            try:
                return LogReader(source)
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise
            time.sleep(LOOK)

    def _wait(self) -> bool:
        """Return whether the next step is there, or comes in time."""
        until = time.monotonic() + self.patience
        while True:
            self._refresh()
            if self._reader.last_step >= max(self.steps, self._reader.first_step):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK)

    def _refresh(self) -> None:
        again = self._reader.refresh()
        if again is None:
            return
        self._span = range(0)
        if self.steps > again:
            self._go_to(max(s for s in self._reader.snapshots() if s <= again))
        self._check_header()

    def _begins(self, step: int) -> bool:
        """Return whether a trainer began from a step: it had loaded what it began with, and no mean was on its way."""
        if step in self._span:
            return False
        self._span = next(span for span in self._reader.steps().values() if step in span)
        return step == self._span.start and step in self._reader.snapshots()

    def _go_to(self, step: int) -> None:
        """Go on from a snapshot, as soon as there is a step behind it."""
        self.steps, self._is_there, self._span = step, False, range(0)

    def _start(self, step: int) -> None:
        """Go on from a snapshot."""
        tensors = self._reader.snapshot(step)
        live = self._held()
        if not self._is_params:
            self._log, self._numbers = Log(reads=True), {}
            self._follow_numbers(self._reader.frame(step), anew=True)
            self._phase = Phase.WARMUP
            live |= {**params_of(self.optimizer), **state_of(self.optimizer.states, "state.")}
            self._gradients = None
            if self._average is not None:
                self._gradients = AveragedGradients(self._of_mean, self._average, self.model)
                live |= state_of(self._gradients.states, "mean.")
        for name in live.keys() ^ tensors.keys():
            got = "none in the snapshot" if name in live else "none here"
            cure = "take the same make and model, and the version of fn that wrote the log"
            raise ValueError(expected("snapshot", f"{name!r} on both sides", got, cure))
        for name, x in live.items():
            if x.shape != tensors[name].shape or x.dtype != tensors[name].dtype:
                wanted = f"{name!r} like the run's, {tensors[name].dtype} {[*tensors[name].shape]}"
                raise ValueError(expected("model", wanted, f"{x.dtype} {[*x.shape]}"))
        with torch.no_grad():
            for name, x in live.items():
                x.copy_(tensors[name])
        if not self._is_params:
            self.optimizer.steps = step
            for unit in self.optimizer.units:
                unit.versions = []  # it is not to warn of what the snapshot has written
        self.steps, self._is_there = step, True

    def _follow_numbers(self, frame: Frame, *, anew: bool = False) -> None:
        """Write into the groups what was changed in the run's before a step; make the optimizer if need be."""
        changed = {name: x for name, x in frame.changed.items() if name != "skipped"}
        self._numbers = {k: x for k, x in {**self._numbers, **changed}.items() if x is not None}
        if not changed and not anew:
            return
        groups = groups_from({name: x for name, x in self._numbers.items() if name.startswith("groups.")})
        self._rests = [group.get("rests", ()) for group in groups]
        named, in_order = dict(self.model.named_parameters()), iter(self._trained)
        made: list[dict[str, Any]] = []
        for group in groups:
            listed = group.pop("params")
            if isinstance(listed, list):
                made.append({"params": [(name, _found(name, named)) for name in listed]})
                continue
            found = [*itertools.islice(in_order, listed)]
            if len(found) < listed:
                cure = "give the run's optimizer model.named_parameters(), which tells them by name"
                raise ValueError(expected("model", f"{listed} more parameters", f"{len(found)}", cure))
            made.append({"params": found})
        settings = [{k: x for k, x in group.items() if k not in LISTS} for group in groups]
        for given in made:
            for p in given["params"]:  # which is left out of a group if it is frozen when that is made
                (p[1] if isinstance(p, tuple) else p).requires_grad_(True)
        if anew:
            assert self.make is not None  # `_check_header` has seen to it
            header: Any = self._reader.header
            with echoing(header["axes"]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run has said it
                self.optimizer = Optimizer(
                    [given | own for given, own in zip(made, settings, strict=True)],
                    self.make,
                    schedule=lambda step: self._phase,
                    max_norm=header["max_norm"],
                    refuse_averaged=False,
                )
            self.optimizer.log = self._log
        added = dict(frame.records)
        for g in range(len(self.optimizer.param_groups), len(made)):
            given, own = made[g], settings[g]
            # Before its state is made, which may begin with a copy of them.
            for p, data in zip(given["params"], added[ADDED, g], strict=True):
                tensor = (p[1] if isinstance(p, tuple) else p).detach()
                tensor.view(-1).view(torch.uint8).copy_(_words(data))
            with warnings.catch_warnings():  # the run has said it
                warnings.simplefilter("ignore")
                self.optimizer.add_param_group(given | own)
        for group, own, of_run in zip(self.optimizer.param_groups, settings, groups, strict=True):
            group.update(own)
            for i, p in enumerate(group["params"]):
                p.requires_grad_(i not in of_run.get("frozen", ()))

    def _take(self) -> int | None:
        """Take the next step, and return its number; None if it diverged, and goes on from a snapshot."""
        step = self.steps
        if self._begins(step) or not self._is_there:
            self._start(step)
        frame = self._reader.frame(step)
        records = {key: leaves for key, leaves in frame.records if key[0] != ADDED}
        digests, bits = records.pop(DIGESTS, None), records.pop(BITS, None)
        if not self._is_params:
            self._step(frame, records)
        if bits is not None:
            change(self._held().values(), bits)
        self.steps = step + 1
        return step if digests is None or self._agrees(step, bytes(digests[0])) else None

    def _step(self, frame: Frame, records: dict[Key, list[Data]]) -> None:
        of_mean = {key: records.pop(key) for key in [*records] if key[:1] == MEAN}
        # First: where a group is added, a mean that is on its way lands.
        self._log.fill((key, [*map(_words, leaves)]) for key, leaves in records.items())
        self._follow_numbers(frame)
        self._phase = phase_from(frame.phase)
        self._fill_gradients(frame, of_mean)
        self.optimizer.step()
        self._log.check_read()

    def _fill_gradients(self, frame: Frame, of_mean: Mapping[Key, list[Data]]) -> None:
        if self._gradients is not None:
            heard = [(key, [*map(_words, leaves)]) for key, leaves in of_mean.items()]
            self._gradients.fill(heard, Phase(self._numbers["mean"]))
        for group, rests in zip(self.optimizer.param_groups, self._rests, strict=True):
            for i, p in enumerate(group["params"]):
                p.grad = None if i in rests else torch.zeros_like(p) if p.grad is None else p.grad
                if self._gradients is not None and p.grad is not None and frame.changed.get("skipped"):
                    p.grad.fill_(torch.nan)  # a GradScaler may have skipped it for what its scale has overflown

    def _agrees(self, step: int, theirs: bytes) -> bool:
        agreed = self._held() if self._is_params else agreed_of(self.optimizer)
        own = digests_of([*agreed.values()])
        parts = zip(range(0, len(own), DIGEST_BYTES), agreed, strict=True)
        tensor = next((name for i, name in parts if own[i : i + DIGEST_BYTES] != theirs[i : i + DIGEST_BYTES]), None)
        if tensor is None:
            return True
        later = [s for s in self._reader.snapshots() if s > step]
        if self.on_divergence == "snapshot" and later:
            self._go_to(later[0])
            return False
        cure = f"go on from the snapshot of step {later[0]}, with to({later[0]})" if later else "wait for a snapshot"
        text = f"behind step {step} {tensor!r} is another one than the run's"
        raise Diverged(f"follower: {text}; follow on a machine like the trainers', or {cure}", step=step, tensor=tensor)


def _found(name: str, named: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter by the name that it has in the run, where DDP and torch.compile put a word in front."""
    own = re.sub(r"^(?:module\.|_orig_mod\.)+", "", name)
    if name not in named and own not in named:
        raise ValueError(expected("model", f"a parameter {own!r}, as the run has", "none"))
    return named[name] if name in named else named[own]


def _words(data: Data) -> Tensor:
    # torch refuses a buffer without bytes, and warns of one that it may not write into.
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
