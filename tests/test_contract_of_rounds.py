"""The contract of `test_contract`, for named optimizers of local steps behind `fn.Optimizer`, on real ranks.

Exchanges that fail: `test_failed_exchanges`.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from functools import partial
from typing import Any

import chains
import pytest
import ranks
import registry
import torch
import torch.distributed as dist
from test_transactions import bits, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fn
from fn import Round, tree
from fn.base import facts_of
from fn.transforms.average_params import AverageParamsState

SHAPES = {"matrix": (6, 5), "vector": (7,), "scalar": (), "empty": (0,), "hollow": (3, 0), "kernel": (2, 3, 4)}
DTYPES = (torch.bfloat16, torch.float64)  # float32: all other tests
METHODS: dict[str, tuple[Any, Any]] = {
    "diloco": (chains.diloco, fn.every(3, start=2)),
    "diloco in signs": (partial(chains.diloco, codec=fn.sign(), store="cpu"), fn.every(3, start=2)),
    "streaming": (
        partial(chains.diloco, codec=fn.int8(), fragments=2, alpha=0.5), fn.every(6, fragments=2, delay=1, start=2)
    ),
    "local_sgd": (partial(fn.local_sgd, momentum=0.9), fn.every(3, start=2)),
    "sparse_loco": (partial(chains.sparse_loco, k=4, tile=4), fn.every(3, start=2)),
    "muloco": (partial(chains.muloco, codec=fn.bins(4, 6)), fn.every(3, start=2)),
    **{method.name: (method.make, method.schedule) for method in registry.CONTRIB_ROUNDS},
}  # fmt: skip
MADE = {name: make(0.02, axis="data") for name, (make, _) in METHODS.items()}
APART = tuple(method.name for method in registry.APART)
"""Methods whose ranks agree on nothing; no exchange makes their params the same."""
WITHOUT_ANCHOR = tuple(name for name, tx in MADE.items() if tree.instances(tx.init([]), AverageParamsState))
LEFT_OUT_BY_ALL = tuple(
    name for name in METHODS if name not in (*APART, *WITHOUT_ANCHOR) and not facts_of(MADE[name]).tree
)
"""Methods of which all ranks leave out an exchange where one rank's params are not finite, in the same round."""
FIRST = 4
"""The step with the first exchange, or its end; further ones follow in each third step."""

two = ranks.Cases(2)
each_method = pytest.mark.parametrize("name", METHODS)


def build(name: str, dtype: torch.dtype = torch.float32, schedule: Any = None, **hyper: Any) -> fn.Optimizer:
    generator = torch.Generator().manual_seed(7)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]
    start += [torch.randn(4, 6, generator=generator).to(dtype).t(), torch.randn(10, generator=generator).to(dtype)[::2]]
    make, given = METHODS[name]
    with fn.bind({"data": dist.group.WORLD}):
        make = partial(make, axis="data", **hyper)
        return fn.Optimizer([torch.nn.Parameter(p) for p in start], make, schedule=schedule or given, lr=0.02)


def params_of(opt: fn.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for p in opt.param_groups[0]["params"]]


def set_gradients(opt: fn.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def take(opt: fn.Optimizer, *steps: int) -> fn.Optimizer:
    for step in steps:
        set_gradients(opt, step)
        opt.step()
    return opt


def own(opt: fn.Optimizer) -> Any:
    """Return the state of local steps."""
    return tree.instances(opt.states, (fn.OuterState, AverageParamsState))[0]


def anchor_of(opt: fn.Optimizer) -> Any:
    return getattr(own(opt), "anchor", ())


def alike(opt: fn.Optimizer, of: Any = None) -> bool:
    """Tell whether params are the same on both ranks, and finite."""
    flat = torch.cat([p.double().flatten() for p in (params_of(opt) if of is None else tree.leaves(of))])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return bool(flat.isfinite().all()) and all(torch.equal(row, rows[0]) for row in rows)


def agree(name: str, opt: fn.Optimizer) -> bool:
    """Tell whether the ranks have the same anchor, and, if none of their own ways is kept, the same params.

    Of methods whose ranks agree on nothing, whether these are finite.
    """
    if name in APART:
        return all(bool(x.isfinite().all()) for x in tree.leaves((params_of(opt), anchor_of(opt))))
    return (name in WITHOUT_ANCHOR or alike(opt, anchor_of(opt))) and (name == "streaming" or alike(opt))


def form_of(opt: fn.Optimizer) -> list[Any]:
    held = (*params_of(opt), *tree.leaves(anchor_of(opt)))
    return [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in held]


@two
def of_all_kinds() -> dict[Any, list[str]]:
    """Train params of any size, layout and dtype; return what is wrong."""
    found = {}
    for name in METHODS:
        for dtype in DTYPES:
            opt = build(name, dtype)
            before, wrong = [p.clone() for p in params_of(opt)], []
            form = form_of(opt)
            for step in range(FIRST + 4):
                take(opt, step)
                if step == FIRST and not agree(name, opt):
                    wrong.append("ranks differ behind an exchange")
            wrong += ["a form"] if form_of(opt) != form else []
            moved = [not torch.equal(p, q) for p, q in zip(params_of(opt), before, strict=True)]
            wrong += [f"moved: {moved}"] if moved != [p.numel() > 0 for p in before] else []
            wrong += [] if all(bool(p.isfinite().all()) for p in params_of(opt)) else ["not finite"]
            found[name, dtype] = wrong + ([f"{opt.skipped} skipped"] if opt.skipped else [])
    return found


@each_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_params_of_any_size_layout_and_dtype_are_trained_and_keep_their_form(name, dtype):
    for found in two.answer("of_all_kinds"):
        assert found[name, dtype] == []


@two
def bad_gradients() -> dict[Any, tuple[bool, int, int, bool]]:
    """Give rank 1 a bad number in a local step, and in one with an exchange."""
    found = {}
    for name in METHODS:
        for step in (FIRST + 2, FIRST + 3):
            opt = take(build(name), *range(step))
            before = bits((params_of(opt), own(opt).inner))
            set_gradients(opt, step)
            if dist.get_rank() == 1:
                opt.param_groups[0]["params"][1].grad[3] = float("nan") if step % 2 else float("inf")
            opt.step()
            rested = same(bits((params_of(opt), own(opt).inner)), before)
            if step != FIRST + 3:
                take(opt, FIRST + 3)
            found[name, step] = rested, int(own(opt).dropped), opt.skipped, agree(name, opt)
    return found


@each_method
@pytest.mark.parametrize("step", [FIRST + 2, FIRST + 3], ids=["alone", "exchange"])
def test_a_bad_gradient_is_dropped_by_its_rank_alone_and_the_round_goes_on(name, step):
    for rank, found in enumerate(two.answer("bad_gradients")):
        rested, dropped, skipped, goes_on = found[name, step]
        assert dropped == rank
        assert skipped == 0
        assert goes_on
        if step == FIRST + 2:
            assert rested == (rank == 1)


def shared(opt: fn.Optimizer) -> list[torch.Tensor]:
    state = own(opt)
    return bits((state.anchor, state.outer, state.sync))


@two
def bad_means() -> dict[Any, dict[str, bool]]:
    """Make a parameter of rank 1 NaN before an exchange begins."""
    found = {}
    for name in LEFT_OUT_BY_ALL:
        schedule = METHODS[name][1]
        for on_skip in ("keep", "anchor"):
            opt = take(build(name, on_skip=on_skip), *range(FIRST + 2))
            begins = FIRST + 3 - (name == "streaming")
            if begins == FIRST + 3:
                take(opt, FIRST + 2)
            assert schedule(begins).begin is not None
            before, dropped = shared(opt), int(own(opt).dropped)
            places = [i for i in range(8) if name != "streaming" or i % 2 == schedule(begins).begin]
            if dist.get_rank() == 1:
                opt.param_groups[0]["params"][places[-1]].data[2] = float("nan")
            take(opt, *range(begins, FIRST + 3))
            twin = copy.deepcopy(opt)
            take(opt, FIRST + 3)
            twin.schedule = lambda step: Round()
            take(twin, FIRST + 3)
            back = own(opt).anchor
            here, anchor, alone = ([x[i] for i in places] for x in (params_of(opt), tree.leaves(back), params_of(twin)))
            seen = {
                "nothing in common has moved": same(shared(opt), before),
                "at the anchor": same(bits(here), bits(anchor)),
                "where the local step led": same(bits(here), bits(alone)),
                # a local step looks at its gradients, and at no params
                "counted": opt.skipped == 1 and int(own(opt).dropped) == dropped,
            }  # fmt: skip
            take(opt, *range(FIRST + 4, FIRST + 13))
            seen["goes on"] = agree(name, opt) and not same(shared(opt), before)
            found[name, on_skip] = seen
    return found


@pytest.mark.parametrize("name", LEFT_OUT_BY_ALL)
@pytest.mark.parametrize("on_skip", ["keep", "anchor"])
def test_a_mean_that_is_not_finite_is_left_out_by_all_ranks(name, on_skip):
    for rank, found in enumerate(two.answer("bad_means")):
        seen, goes_back = found[name, on_skip], on_skip == "anchor" or rank == 1
        assert seen == {
            "nothing in common has moved": True,
            "at the anchor": goes_back,
            "where the local step led": not goes_back,
            "counted": True,
            "goes on": True,
        }


OTHERS = {
    "b2": ("diloco", {"b2": 0.9}),
    "outer_lr": ("diloco", {"outer_lr": 0.5}),
    "outer_momentum": ("muloco", {"outer_momentum": 0.3}),
    "nesterov": ("diloco", {"nesterov": False}),
    "codec": ("diloco", {"codec": fn.int8()}),
    "block": ("diloco in signs", {"codec": fn.sign(block=64)}),
    "feedback": ("diloco in signs", {"feedback": fn.off()}),
    "alpha": ("streaming", {"alpha": 0.25}),
    "store": ("diloco", {"store": torch.bfloat16}),
    "on_skip": ("local_sgd", {"on_skip": "anchor"}),
    "momentum": ("local_sgd", {"momentum": 0.5}),
    "keep": ("sparse_loco", {"keep": 0.9}),
    "k": ("sparse_loco", {"k": 5}),
    "tile": ("sparse_loco", {"tile": 8}),
    "threshold": ("norm_guard", {"guard": {"threshold": 2.0}}),
    "seed": ("sparta", {"seed": 1}),
    "h": ("diloco", {"schedule": fn.every(4, start=2)}),
    "delay": ("diloco", {"schedule": fn.every(3, delay=1, start=2)}),
}
SAID = {"outer_lr": "lr", "outer_momentum": "decay", "momentum": "decay", "feedback": "off", "tile": "params["}
"""What a hyper-parameter is called in its link, or its value. Parts of other tiles have other shapes."""


@two
def others() -> dict[str, tuple[str, str]]:
    found = {}
    for what, (name, hyper) in OTHERS.items():
        try:
            build(name, **(hyper if dist.get_rank() == 1 else {}))
            found[what] = "nothing", ""
        except (ValueError, TypeError) as error:
            found[what] = type(error).__name__, str(error)
    return found


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_with_other_hyper_parameters_are_refused_by_name(what):
    for found in two.answer("others"):
        kind, text = found[what]
        assert kind == "RanksDisagree", text
        assert SAID.get(what, what) in text
        assert "rank 1" in text


@two
def saved() -> dict[str, list[int]]:
    """Go on from a file that was written before each step of a round; return the steps from which it differs."""
    found, until = {}, FIRST + 6
    for name in METHODS:
        opt, rest = build(name, torch.bfloat16), {}
        for step in range(until):
            if FIRST <= step < FIRST + 4:
                file = io.BytesIO()
                torch.save(opt.state_dict(), file)
                file.seek(0)
                rest[step] = build(name, torch.bfloat16)
                rest[step].load_state_dict(torch.load(file, weights_only=True))
                for p, q in zip(params_of(rest[step]), params_of(opt), strict=True):
                    p.copy_(q)
            take(opt, step)
        for step, other in rest.items():
            take(other, *range(step, until))
        ends = {s: bits((params_of(other), other.states)) for s, other in rest.items()}
        end = bits((params_of(opt), opt.states))
        found[name] = [s for s, other in ends.items() if not same(other, end)]
    return found


@each_method
def test_a_state_dict_of_any_step_of_a_round_continues_bit_for_bit(name):
    for found in two.answer("saved"):
        assert found[name] == []


def pure_steps(name: str, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the params of a rank after pure steps with its gradients, tensor by tensor (8, *shape)."""
    make, schedule = METHODS[name]
    tx, params = make(0.02, axis="data"), [torch.ones(x.shape[1:], dtype=x.dtype) for x in gradients]
    state = tx.init(params)
    for step in range(FIRST + 4):
        updates, state = tx.update(schedule(step))([g[step] for g in gradients], state, params)
        params = fn.apply_updates(params, updates)
    return params


def on_real_ranks(gradients: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    with fn.bind({"data": dist.group.WORLD}):
        return {name: pure_steps(name, [g[dist.get_rank()] for g in gradients]) for name in METHODS}


def test_real_ranks_take_the_steps_of_simulated_ones():
    gradients = [torch.randn(3, FIRST + 4, *shape, dtype=torch.float64) for shape in SHAPES.values()]
    answers = ranks.run(3, on_real_ranks, gradients)
    for name in METHODS:
        found = fn.simulate(partial(pure_steps, name), "data", 3)(gradients)
        for rank, params in enumerate(answers):
            torch.testing.assert_close(params[name], [p[rank] for p in found], rtol=0, atol=1e-9, msg=name)


@two
def in_other_order() -> dict[str, bool]:
    """Take pure steps with gradients and params whose keys are in another order."""
    found = {}
    for name, (make, schedule) in METHODS.items():
        generator = torch.Generator().manual_seed(3)
        params = {k: torch.randn(shape, generator=generator) for k, shape in SHAPES.items()}
        other = dict(reversed(params.items()))
        with fn.bind({"data": dist.group.WORLD}):
            tx = make(lr=0.02, axis="data")
            state = turned = tx.init(params)
            for step in range(FIRST + 4):
                g = {k: torch.randn(p.shape, generator=generator) + dist.get_rank() for k, p in params.items()}
                updates, state = tx.update(schedule(step))(g, state, params)
                params = fn.apply_updates(params, updates)
                updates, turned = tx.update(schedule(step))(dict(reversed(g.items())), turned, other)
                other = fn.apply_updates(other, updates)
        found[name] = same(bits((params, state)), bits(({k: other[k] for k in params}, turned)))
    return found


@each_method
def test_keys_may_come_in_any_order(name):
    assert all(found[name] for found in two.answer("in_other_order"))


class Allocations(TorchDispatchMode):
    """The storages that are allocated in this thread, in order. Those of other threads, at any time, are not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._known: Any = weakref.WeakValueDictionary()  # address -> storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._new(args, kwargs)
        made = func(*args, **(kwargs or {}))
        self.storages += map(weakref.ref, self._new(made))
        return made

    def _new(self, *values: Any) -> list[torch.UntypedStorage]:
        """Return the storages among values that were not known, which they are then."""
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tree_leaves(values) if torch.is_tensor(x)}
        new = {address: storage for address, storage in storages.items() if address not in self._known}
        self._known.update(new)
        return list(new.values())


@two
def held() -> dict[str, tuple[Any, ...]]:
    """Return what steps allocated and left alive, and how many updates there are, behind two rounds, and behind four.

    The thread of a delayed mean may hold what it was given until the next one has come. So what the last steps
    allocated is left out.
    """
    found = {}
    for name in METHODS:
        opt, allocations, counts, seen = build(name), Allocations(), [], []
        for step in range(FIRST + 13):
            set_gradients(opt, step)
            with allocations:
                opt.step()
            counts.append(len(allocations.storages))
            if step in (FIRST + 6, FIRST + 12):
                gc.collect()
                storages = [ref() for ref in allocations.storages[: counts[step - 4]]]
                sizes = [storage.nbytes() for storage in storages if storage is not None]
                buffers = [x.data_ptr() for x in tree.leaves((own(opt).inner, anchor_of(opt)))]
                seen.append((len(sizes), sum(sizes), len(opt.updates), buffers))
        found[name] = tuple(seen)
    return found


@each_method
def test_no_round_makes_updates_anew_or_holds_more_memory(name):
    for found in two.answer("held"):
        before, after = found[name]
        assert before == after
