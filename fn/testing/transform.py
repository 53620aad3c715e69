"""`check_transform`: whether a transform keeps what loops, simulations and adapters rely on.

>>> import torch, fn
>>> fn.testing.check_transform(fn.diloco(1e-3, axis="data"), {"w": torch.ones(3)}, fn.every(4, start=2)).faults
()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_is_transform, checked
from fn.base import Phase, Round, Transform, apply_updates, facts_of
from fn.collectives.axis import ALONE, axis_index, current_binding, names, rank_dims
from fn.collectives.primitives import all_gather
from fn.collectives.simulation import simulate
from fn.roles import has_local_params
from fn.schedules import FreezeWhenStable, Schedule, phase_of
from fn.testing.codec import Report
from fn.testing.kernels import Check, run_checks
from fn.transforms.skip_nonfinite import SkipState

Tree = Any
SCANNED, IN_A_ROW, OF_A_KIND = 100_000, 3, 6
"""How many steps of a schedule are read; how many equal ones are taken in a row, and in all of each phase or round."""


@checked("schedule")
def check_transform(
    tx: Transform, params: Tree, schedule: Schedule, *, axis: str | tuple[str, ...] | None = None
) -> Report:
    """Check what is asked of every transform, in each phase and round that a schedule comes to.

    The ranks are simulated and have different gradients. Checked is whether

    - an update leaves its arguments alone, and gives the same numbers the second time;
    - a state keeps its structure, shapes and dtypes;
    - all fields that are not in `rank_local` are the same on all ranks, and so are params, unless the class of a state
      declares `local_params`;
    - the parts of a round lead where the whole round leads, and the part that averages neither reads nor returns
      params, nor changes what local steps change;
    - behind `fn.skip_nonfinite` a NaN on one rank makes all ranks skip, or only that one in a round.

    Inside of `fn.bind`, on all ranks, the same steps are also taken over the process groups. It starts no processes.

    Args:
        tx: the transform. params: a tree of small tensors, as the transform is meant for, alike on all ranks.
        schedule: step -> Phase or Round. Of long runs of one phase a few steps are taken.
        axis: over which it communicates; None: the axes that are bound, or those of the transform's facts.
    Returns: a report, true if nothing was wrong; each of its `faults` names the step, the leaf and the cure.
    Raises: TypeError if tx is no transform, or params are no tensors.
    """
    check_is_transform("tx", tx)
    tree.check_real(params, "params")
    bound = {name: a.size for name, a in current_binding().axes.items() if a.transport != ALONE}
    axes = names(axis) if axis is not None else tuple(bound) or facts_of(tx).axes or ("data",)
    sizes = {name: bound.get(name, 3 if len(axes) == 1 else 2) for name in axes}
    run = _Run(tx, params, sizes, real=bool(bound) and bound.keys() >= sizes.keys())
    checks, faults = run_checks(_checks(run, _steps(tx, schedule)))
    return Report(checks, tuple(faults))


def _steps(tx: Transform, schedule: Schedule) -> Sequence[Phase | Round]:
    """Return the phases and rounds that a schedule comes to, a few of each, in their order."""
    if isinstance(schedule, FreezeWhenStable):  # which waits for norms
        return [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 3
    chosen: list[Phase | Round] = []
    counts, in_a_row, last = Counter[Any](), 0, None
    for step in range(SCANNED):
        phase = phase_of(schedule, step)
        if tx.exchange is None and isinstance(phase, Round):
            phase = phase.phase
        in_a_row = in_a_row + 1 if phase == last else 1
        last = phase
        if in_a_row <= IN_A_ROW and counts[phase] < OF_A_KIND:
            counts[phase] += 1
            chosen.append(phase)
    # A first step in codes uses what a warm-up step leaves in the state, so one is put in front.
    return [Phase.WARMUP, *chosen] if chosen and chosen[0].phase in tx.needs_warmup else chosen


def _checks(run: _Run, steps: Sequence[Phase | Round]) -> Iterator[Check]:
    yield "init", run.start
    delayed = any(isinstance(phase, Round) and phase.begin != phase.end for phase in steps)
    for number, phase in enumerate(steps):
        if not run.goes_on:
            return
        what = f"step {number}, {phase}"
        yield what, partial(run.take, phase, number)
        if not run.goes_on:
            return
        yield f"{what}, replicas", run.replicas
        if run.tx.exchange is not None and phase is not Phase.WARMUP:
            yield f"{what}, parts", partial(run.parts, phase, delayed)
        if isinstance(run.before[1], SkipState):
            yield f"{what}, NaN on one rank", partial(run.skips, phase)
        if run.real:
            yield f"{what}, process group", partial(run.on_ranks, phase)
        run.state, run.params = run.after


class _Run:
    """A run on simulated ranks. Every leaf has the ranks' dimensions in front, one for each axis.

    state, params: of all ranks. before: the arguments of the last step. after: its state and params. goes_on: whether
    it went well enough for another step. own_state, own_params: this rank's, over process groups.
    """

    def __init__(self, tx: Transform, params: Tree, sizes: dict[str, int], *, real: bool):
        self.tx, self.sizes, self.real, self.goes_on = tx, sizes, real, False
        self.given = tree.map(lambda p: p.detach().clone(), params)
        self.lead = tuple(sizes.values())
        self.before: Any = ()
        self.after: Any = ()

    def simulated(self, f: Callable[..., Any], *args: Any) -> Any:
        for name, size in reversed(self.sizes.items()):
            f = simulate(f, name, size)
        return f(*args)

    def start(self) -> str | None:
        # (...) -> (W of each axis, ...), with memory for each rank: a view would hide who writes into it
        self.params = tree.map(lambda p: p.expand(*self.lead, *p.shape).clone(), self.given)
        kept = tree.map(torch.clone, self.params)
        self.state = self.simulated(self.tx.init, self.params)
        if fault := _differs(kept, self.params, ""):
            return f"init writes into the params: {fault}; let it clone them"
        self.dims = rank_dims(self.state)
        if self.real:
            self.own_params = tree.map(torch.clone, self.given)
            self.own_state = self.tx.init(self.own_params)
        self.goes_on = True
        return None

    def take(self, phase: Phase | Round, number: int) -> str | None:
        """Take a step. It may not write into its arguments, change the state's structure, or differ when repeated."""
        self.goes_on = False
        generator = torch.Generator("cpu").manual_seed(number)

        def like(p: Tensor) -> Tensor:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu")
            return (p.detach().cpu().double() + noise).to(p)

        self.before = tree.map(like, self.params), self.state, self.params
        # A version counts writes, also those that leave the numbers as they are for these gradients.
        kept, versions = tree.map(torch.clone, self.before), [x._version for x in tree.leaves(self.before)]
        self.after = self.step(phase, *self.before)
        for place, (x, version) in enumerate(zip(tree.leaves(self.before), versions, strict=True)):
            if x._version != version:
                path = ("updates", "state", "params")[int(tree.paths(self.before)[place].split(".")[0])]
                leaf = tree.paths(self.before)[place].partition(".")[2] or "the root"
                cure = "write torch.add(x, y) for x.add_(y), and so on"
                return f"the update writes into its argument {path}, leaf {leaf!r}; {cure}"
        if fault := self.other_form():
            return fault
        self.goes_on = True
        if _differs(kept, self.before, "") or _differs(self.after, self.step(phase, *kept), ""):
            return "the same arguments give other numbers the second time; keep what changes in the state, as tensors"
        return None

    def step(self, phase: Phase | Round, *args: Tree) -> tuple[Tree, Tree]:
        """Return the state and the params after a whole step."""

        def on_rank(g: Tree, s: Tree, p: Tree) -> tuple[Tree, Tree]:
            updates, after = self.tx.composed(phase)(g, s, p)
            return after, apply_updates(p, updates)

        result: tuple[Tree, Tree] = self.simulated(on_rank, *args)
        return result

    def other_form(self) -> str | None:
        cure = "a state has the same structure, shapes and dtypes in every phase"
        old, new = self.before[1], self.after[0]
        if tree.flatten(old)[1] != tree.flatten(new)[1]:
            lost, more = ({*tree.paths(a)} - {*tree.paths(b)} for a, b in ((old, new), (new, old)))
            return f"the state's structure changes, leaves lost: {sorted(lost)}, new: {sorted(more)}; {cure}"
        for path, a, b in zip(tree.paths(old), tree.leaves(old), tree.leaves(new), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                n = len(self.lead)
                was, now = (f"{x.dtype} {tuple(x.shape[n:])}" for x in (a, b))
                return f"leaf {path!r} of the state was {was} and becomes {now}; {cure}"
        return None

    def replicas(self) -> str | None:
        """Compare what must be the same on all ranks."""
        state, params = self.after
        for path, x, dim in zip(tree.paths(state), tree.leaves(state), tree.leaves(self.dims), strict=True):
            if dim is None and not _is_alike(x, len(self.lead)):
                cure = "name its field in the property rank_local of its class, or make it from what all ranks share"
                return f"leaf {path!r} of the state differs between ranks, but is called replicated; {cure}"
        if not _has_local_params(state):
            for path, x in zip(tree.paths(params), tree.leaves(params), strict=True):
                if not _is_alike(x, len(self.lead)):
                    cure = "move them by what was averaged, or let the state's class say local_params"
                    return f"leaf {path or 'the root'!r} of the params differs between ranks; {cure}"
        return None

    def parts(self, phase: Phase | Round, delayed: bool) -> str | None:
        """Take the exchange of a round in its three parts, as an adapter does; they lead where the whole leads."""
        phase = {Phase.COMPRESSED: Round(0, 0), Phase.LOCAL: Round()}[phase] if isinstance(phase, Phase) else phase
        g, state, params = self.before
        local_state, local_params = self.step(Phase.LOCAL, g, state, params)
        here, now = local_params, local_state
        if phase.begin is not None:
            here, now = self.part("difference", phase.begin, now, here)
            if delayed or phase.begin != phase.end:
                # A mean that reads params of NaN returns other params, or another state than with the real ones.
                unknown = tree.map(lambda p: torch.full_like(p, torch.nan), here)
                returned, blind = self.part("mean", phase.begin, now, unknown)
                if any(not bool(x.isnan().all()) for x in tree.leaves(returned)):
                    cure = "return them in 'outer', for local steps move them while the mean travels"
                    return f"the part 'mean' returns params; {cure}"
                if fault := _differs(self.part("mean", phase.begin, now, here)[1], blind, ""):
                    cure = "note them in the state in 'difference', for local steps move them meanwhile"
                    return f"the part 'mean' reads the params ({fault}); {cure}"
                if both := _changed(state, local_state) & _changed(local_state, blind):
                    cure = "let the exchange keep what it changes in fields of its own"
                    return f"leaf {min(both)!r} is changed by local steps and by a mean that travels meanwhile; {cure}"
                now = blind
            else:
                here, now = self.part("mean", phase.begin, now, here)
        if phase.end is not None:
            here, now = self.part("outer", phase.end, now, here)
        cure = "let the update of a round be the local step and what the exchange does, one after the other"
        fault = _differs(self.after[0], now, "of the state ") or _differs(self.after[1], here, "of the params ")
        return f"the parts differ from the whole round at {fault}; {cure}" if fault else None

    def part(self, name: str, number: int, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Return the params and the state after a part of the exchange."""

        def on_rank(s: Tree, p: Tree) -> tuple[Tree, Tree]:
            new, after = getattr(self.tx.exchange, name)(number, s, p)
            return tree.map(lambda x, old: x.to(old.dtype), new, p), after

        result: tuple[Tree, Tree] = self.simulated(on_rank, state, params)
        return result

    def skips(self, phase: Phase | Round) -> str | None:
        """Give the last rank a NaN: all skip where they meet over gradients; elsewhere that rank drops its step."""
        g, state, params = self.before
        bad = tree.map(torch.clone, g)
        first = next((x for x in tree.leaves(bad) if x.numel()), None)
        if first is None:
            return None
        # The last rank's last element: a check on rank 0 alone, or on first elements, would not see it.
        first[(-1,) * first.ndim] = torch.nan
        after, moved = self.step(phase, bad, state, params)
        cure = "let a NaN reach what is sent, so that all ranks see it, and guard the whole chain by fn.skip_nonfinite"
        meets = phase is Phase.WARMUP or (phase is Phase.COMPRESSED and self.tx.exchange is None)
        if meets and not bool((after.skipped == state.skipped + 1).all()):
            return f"a NaN on one rank is not skipped and counted by all ranks; {cure}"
        if meets and (fault := _differs((state.inner, params), (after.inner, moved), "")):
            return f"a skipped step moves {fault}; {cure}"
        for path, x in zip(tree.paths((after, moved)), tree.leaves((after, moved)), strict=True):
            if x.is_floating_point() and not x.isfinite().all():
                return f"a NaN in one rank's gradient stays in leaf {path!r}; leave that rank's step out"
        return None

    def on_ranks(self, phase: Phase | Round) -> str | None:
        """Take the step over process groups; it gives what this rank has in the simulation, alike on all ranks."""
        index = tuple(int(axis_index(name)) for name in self.sizes)
        updates, self.own_state = self.tx.composed(phase)(
            tree.map(lambda x: x[index], self.before[0]), self.own_state, self.own_params
        )
        self.own_params = apply_updates(self.own_params, updates)
        alike = [] if _has_local_params(self.own_state) else tree.leaves(self.own_params)
        leaves = zip(tree.leaves(self.own_state), tree.leaves(rank_dims(self.own_state)), strict=True)
        alike += [x for x, dim in leaves if dim is None]
        differs = False
        for x in alike:  # every rank gathers all of them, whatever it finds
            rows = x
            for name in reversed(self.sizes):
                rows = all_gather(rows, name)
            # (W of each axis, ...) -> (W, ...)
            rows = rows.flatten(0, len(self.sizes) - 1)
            differs |= not torch.equal(rows.nan_to_num(), rows[:1].expand_as(rows).nan_to_num())
        if differs:
            return "what all ranks are to hold alike differs in some bits; make it of the same numbers in one order"
        fault = _differs(tree.map(lambda x: x[index], self.after[1]), self.own_params, "of the params ", 1e-3)
        cure = "let fn's collectives exchange, by the name of an axis"
        return f"the step differs from the simulated one at {fault}; {cure}" if fault else None


def _is_alike(x: Tensor, dims: int) -> bool:
    # (W of each axis, ...) -> (W, ...)
    rows = x.flatten(0, dims - 1)
    return _close(rows, rows[:1].expand_as(rows), 1e-5)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    return torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


def _differs(a: Tree, b: Tree, whose: str, tolerance: float = 1e-5) -> str | None:
    """Return the first leaf at which trees differ."""
    if tree.flatten(a)[1] != tree.flatten(b)[1]:
        return f"the structure {whose}".strip()
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        if not _close(x, y, tolerance):
            return f"leaf {path or 'the root'!r} {whose}".strip()
    return None


def _changed(before: Tree, after: Tree) -> set[str]:
    triples = zip(tree.paths(before), tree.leaves(before), tree.leaves(after), strict=True)
    return {path for path, x, y in triples if not torch.equal(x.nan_to_num(), y.nan_to_num())}


def _has_local_params(state: Tree) -> bool:
    """Tell whether a class of states says that each rank goes to params of its own."""
    return any(map(has_local_params, tree.named_tuples(state)))
