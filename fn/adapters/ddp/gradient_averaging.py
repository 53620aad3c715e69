"""The mean of gradients in codes, behind the backward pass, for any optimizer of torch.

model = DistributedDataParallel(model)
mean = average_gradients(model, fn.int8(), fn.damped(), schedule=fn.freeze_after(1000))
opt = torch.optim.AdamW(model.parameters())        # finds averaged gradients, as always under DDP
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.ddp.backward_pass import BackwardPass, Threads, leaving_order
from fn.adapters.optim.gradients import unscaled
from fn.adapters.optim.state_dict import check_fits, check_keys, check_tensor
from fn.arguments import check_is_transform
from fn.base import Phase, Transform, UpdateFn
from fn.collectives import following
from fn.collectives.axis import Binding
from fn.collectives.codecs.codec import Codec
from fn.collectives.feedback import Feedback
from fn.errors import expected
from fn.schedules import Schedule, phase_of
from fn.transforms.average import compressed_average
from fn.transforms.resharding import Move, Rows, reshapes, rounds_off
from fn.transforms.skip_nonfinite import all_finite

Tree = Any

logger = logging.getLogger("fn")


class GradientAverage:
    """Averages the gradients of one DDP model. Made by `fn.adapters.ddp.average_gradients`.

    steps: synchronised backward passes so far. skipped: those that were not finite on some rank; they leave the errors
    as they were and deliver the non-finite gradients to all ranks. states: the errors, one entry per bucket of
    parameters; new tensors after each step. names: of the parameters of each. now: the phase of the step that is taken,
    or was taken last. bytes: what a rank sent in the last step of each phase.
    """

    log: following.Log | None = None
    """What all ranks get alike in a step, by bucket, where somebody follows this run."""

    def __init__(
        self, buckets: Sequence[Sequence[Tensor]], names: Mapping[Tensor, str], transform: Transform,
        states: tuple[Tree, ...], binding: Binding, schedule: Schedule, scaler: Any, frozen: Sequence[Tensor],
    ):  # fmt: skip
        self.steps, self.skipped, self.states, self.schedule = 0, 0, states, schedule
        self.bytes: dict[Phase, int] = {}
        self.is_paused = False  # DDP has a `no_sync` of its own
        self._buckets, self.transform, self._scaler = buckets, transform, scaler
        ((size, rank, _),) = binding.axes.values()
        self.binding = binding
        self._frozen, self._who, self._size = frozen, f"rank {int(rank)} of {size}", size
        self.names = [[names[p] for p in bucket] for bucket in buckets]
        self._order = leaving_order(buckets, names)
        self._threads = Threads([binding], buckets[0][0].device)
        self.now, self._pass = Phase.WARMUP, None
        self._task, self._was_finite = -1, True  # of gradients that come alone

    _pass: BackwardPass | None
    _job_of_pass: Callable[[int, list[Tensor]], Callable[[], Any]]

    @property
    def phase(self) -> Phase:
        """Return the phase of the next step."""
        return phase_of(self.schedule, self.steps).phase

    def begin(self) -> BackwardPass:
        """Begin a backward pass.

        Raises: ValueError in the local phase and after `close`: nobody would average.
        """
        self._prepare()
        self._pass = BackwardPass(self._threads, self._buckets, self._order, self._job_of_pass)
        return self._pass

    def _prepare(self) -> None:
        """Take over what the jobs of a pass are computed with."""
        if not self._threads:
            text = "nobody averages them any more, for average_gradients was closed"
            raise ValueError(f"gradients: {text}; wrap the module anew: DistributedDataParallel(model.module)")
        self.now = self.phase
        if self.now is Phase.LOCAL:
            raise ValueError("schedule: asks for the local phase; gradients have only a warm-up and a compressed one")
        self._warn_of_thawed()
        scale = None if self._scaler is None else float(self._scaler.get_scale())
        self._job_of_pass = partial(self._job_of, self.transform.update(self.now), scale)

    def _warn_of_thawed(self) -> None:
        """Warn, once, of parameters that DDP does not know: their gradients stay each rank's own."""
        if count := sum(p.requires_grad for p in self._frozen):
            self._frozen = ()
            text = (
                f"gradients: {count} parameters were thawed after DistributedDataParallel was made; nobody averages "
                f"theirs, and the ranks drift apart; wrap the model anew, and call average_gradients for it"
            )
            warnings.warn(text, stacklevel=2)

    def _job_of(self, update: UpdateFn, scale: float | None, bucket: int, grads: list[Tensor]) -> Any:
        """Return a function that averages a bucket into its gradients, and returns (finite, new state)."""

        def average() -> tuple[bool, Tree]:
            params = [p.detach() for p in self._buckets[bucket]]
            # Unscaled before they are encoded: errors go into the next pass, whose scale may be another.
            (wide,) = unscaled([grads], scale, None)
            # A pass that comes again before a step replaces the one before, as its gradients do.
            with following.at(self.log, (bucket,), lambda: self.binding.axes):
                means, after = update(wide, self.states[bucket], params)
            for g, mean in zip(grads, means, strict=True):
                # Scaled again, for GradScaler will divide what it finds in p.grad.
                g.copy_(mean if scale is None else mean * scale)
            return bool(all_finite(means)), after

        return average

    def on_gradient(self, grad: Tensor, p: Tensor) -> None:
        """Average a gradient that comes alone, in a bucket of its own, before the backward pass goes on.

        A DDP without a reducer calls it inside of a compiled graph. There no callback says that a pass is over, so
        nothing may wait for its end, and the first gradient counts the step. Errors of a tensor are taken over where
        that tensor is finite.
        """
        task = torch._C._current_graph_task_id()
        is_first = task != self._task
        if is_first:
            self._prepare()
        place = next(i for i, (own,) in enumerate(self._buckets) if own is p)
        sent = BackwardPass(self._threads, self._buckets, [place], self._job_of_pass)
        sent.arrive([p], [grad])
        ((is_finite, after),) = sent.results()
        self._threads.catch_up()
        if is_first:
            self._task, self._was_finite, self.bytes[self.now] = task, True, 0
            self.steps += 1
        if is_finite:
            self.states = tuple(after if i == place else state for i, state in enumerate(self.states))
        elif self._was_finite:
            self._was_finite, self.skipped = False, self.skipped + 1
        self.bytes[self.now] += sent.bytes

    def on_last(self) -> None:
        """Send what DDP says nothing of, with zeros."""
        assert self._pass is not None
        self._pass.end()

    def on_sent(self) -> None:
        """Take the new errors over if all buckets are finite. Raises what a job raised; nothing is taken over then."""
        assert self._pass is not None
        ended, self._pass = self._pass, None
        results = ended.results()
        if all(finite for finite, _ in results):
            self.states = tuple(after for _, after in results)
        else:
            self.skipped += 1
        # Also for a pass that was not finite: all ranks count passes, and their phases go by that.
        self.steps += 1
        self.bytes[self.now] = ended.bytes

    def on_end(self) -> None:
        """Leave the averaged gradients to the user."""

    def close(self) -> None:
        """End the thread, and give back its process group. See `fn.adapters.ddp.close`."""
        self._threads.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Return steps, skipped steps and errors as a flat {path: tensor}.

        The errors are this rank's own. Their paths name it, so that `torch.distributed.checkpoint`, which writes once
        what several ranks call alike, keeps those of all of them.
        """
        errors = {path: leaf.clone() for path, leaf in tree.by_path(self.states, f"state of {self._who}.").items()}
        return {**self._counts(), **errors}

    def _counts(self) -> dict[str, Tensor]:
        counts = {"steps": self.steps, "skipped": self.skipped}
        return {name: torch.tensor(count, dtype=torch.int64, device="cpu") for name, count in counts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, bit for bit; or what another number of ranks saved.

        The latter takes the dicts of all of them in one, `{**rank0, **rank1, ...}`, whose keys name their ranks. Each
        rank starts from the mean of the errors, so what was not delivered still is, up to what errors of 8 bits hold.

        Raises: ValueError that names the first path that does not fit, or a rank that is missing; TypeError for what is
            no tensor. Nothing is loaded then.
        """
        check_keys(state_dict, "GradientAverage")
        errors = tree.by_path(self.states, f"state of {self._who}.")
        ranks = _ranks(state_dict)
        world = next(iter(ranks), (0, 0))[1]
        mine = {path: leaf for path, leaf in state_dict.items() if not _RANK.match(path) or path in errors}
        if world != self._size and _is_complete(ranks):
            states = self._moved(state_dict, world)
        else:
            self._check_rank(ranks)
            check_fits(self.state_dict(), mine if errors else state_dict)
            # A copy: the dict stays the caller's, and a step may write over its own errors.
            leaves = [mine[path].to(leaf.device, copy=True) for path, leaf in errors.items()]
            states = tree.unflatten(tree.flatten(self.states)[1], leaves)
        self.steps, self.skipped = int(state_dict["steps"]), int(state_dict["skipped"])
        self.states = states

    def _moved(self, saved: Mapping[str, Any], world: int) -> tuple[Tree, ...]:
        """Return the states of this rank from those of all ranks of another world."""
        # A state as it would begin in this world: its layout, and notes of how rows of another world move into it.
        with self.binding, torch.no_grad(), reshapes.collected() as notes:
            fresh = tuple(self.transform.init([p.detach() for p in bucket]) for bucket in self._buckets)
        like = tree.by_path(fresh, "")
        forms = self._counts()
        for path, leaf in like.items():  # shapes may differ between worlds, but not within one
            first = saved.get(f"state of rank 0 of {world}.{path}", leaf)
            check_tensor(f"state of rank 0 of {world}.{path}", first)
            form = torch.empty(first.shape, dtype=leaf.dtype, device="meta")
            forms.update({f"state of rank {rank} of {world}.{path}": form for rank in range(world)})
        check_fits(forms, saved)
        gathered: list[Any] = []
        for path, mark in tree.by_path(roles.kinds(fresh), "").items():
            # W' tensors (...), one of each rank that saved -> (W', ...).
            of_ranks = [saved[f"state of rank {rank} of {world}.{path}"].to(like[path].device) for rank in range(world)]
            gathered.append(of_ranks[0].clone() if mark == roles.SAME else Rows(torch.stack(of_ranks), 0, world))
        no_rows = Rows(torch.empty(0, dtype=torch.float32, device="cpu"), 0, world)
        first_rows = next((x for x in gathered if isinstance(x, Rows)), no_rows)
        move = Move(notes, first_rows, lambda addends: addends)
        with self.binding:
            moved: tuple[Tree, ...] = move.walk(fresh, tree.unflatten(tree.flatten(fresh)[1], gathered))
        if self._size == 1:
            text = "average_gradients: a single rank encodes nothing; what %d ranks had not delivered is lost"
            logger.warning(text, world)
        elif rounds_off(gathered):
            logger.warning("average_gradients: its errors were rounded anew; up to one step of their codes is lost")
        return moved

    def _check_rank(self, ranks: set[tuple[int, int]]) -> None:
        """Refuse a state that has errors of others only, or not of all ranks of another world."""
        if not ranks or any(f"rank {rank} of {size}" == self._who for rank, size in ranks):
            return
        rank, size = min(ranks)
        cure = f"merge what all {size} ranks saved into one dict, whose keys name their ranks, and load that"
        sizes = sorted({size for _, size in ranks})
        if len(sizes) > 1:
            cure = f"it holds states of {' and of '.join(map(str, sizes))} ranks; load those of one run"
        elif len(ranks) > 1 and not _is_complete(ranks):
            missing = next(rank for rank in itertools.count() if (rank, size) not in ranks)
            cure = f"the state of rank {missing} is missing; {cure}"
        got = f"the state of rank {rank} of {size}"
        raise ValueError(expected("state_dict", f"the state of {self._who}", got, cure))


def _is_complete(ranks: set[tuple[int, int]]) -> bool:
    """Return whether these are all ranks of one world; a key may name one of any size, so nothing counts up to it."""
    sizes = {size for _, size in ranks}
    return sizes == {len(ranks)} and all(rank < len(ranks) for rank, _ in ranks)


_RANK = re.compile(r"state of rank (\d{1,9}) of (\d{1,9})\.", re.ASCII)
"""How the path of an error begins: its rank, and of how many."""


def _ranks(saved: Iterable[str]) -> set[tuple[int, int]]:
    """Return the ranks, and of how many, of whom a flat state has errors."""
    matches = (_RANK.match(path) for path in saved)
    return {(int(name[1]), int(name[2])) for name in matches if name}


def coded_average(
    axis: str, codec: Codec | None, feedback: Feedback | None, average: Callable[..., Transform] | None, servers: bool
) -> Transform:
    """Return the average of the compressed phase, in a codec or as `average` makes it.

    Raises: ValueError unless one of codec and average is given, and for settings beside an average; TypeError for an
        average that makes no transform.
    """
    if (codec is None) == (average is None):
        wanted = "one of both, such as codec=fn.int4() or average=partial(fn.low_rank_average, rank=4)"
        raise ValueError(expected("codec, average", wanted, "neither" if codec is None else "both"))
    if codec is not None:
        return compressed_average(axis, codec, feedback, servers=servers)
    if feedback is not None or not servers:
        named = "feedback" if feedback is not None else "servers"
        cure = "give average its settings: partial(fn.low_rank_average, rank=4, feedback=fn.off())"
        raise ValueError(expected(named, "a codec beside it", "average", cure))
    if not callable(average) or isinstance(average, Transform):
        wanted = "a function that makes a transform, such as partial(fn.low_rank_average, rank=4)"
        raise TypeError(expected("average", wanted, type(average).__name__))
    made = average(axis=axis)
    check_is_transform("average", made)
    return made
