"""A run is a log: what all ranks got alike, whatever carried it, gives a process without ranks the same params."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.collectives import owners
from fn.collectives.axis import Axis, Binding
from fn.collectives.carriers import Carrier
from fn.collectives.transports.registry import Transport, register

STEPS = 12
CARRIERS = ("tcp", "gloo", "registered", "device")


def on(make, **more):
    return partial(make, axis="data", **more)


def int4_adamw(lr, axis, codec=None):
    codec = codec or fn.int4()
    return fn.chain(fn.compressed_average(axis, codec, fn.damped()), fn.scale_by_adam(), fn.scale_by_learning_rate(lr))


def replicated_muon(lr):
    rest = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    muon = fn.chain(fn.scale_by_muon(), fn.scale_by_learning_rate(lr))
    by_rank = {"matrix": muon, "vector": rest}
    labels = lambda params: fn.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)  # noqa: E731
    return fn.chain(fn.average("data"), fn.partition(by_rank, labels))


def islands(lr):
    inner = fn.chain(fn.compressed_average("local", fn.int8()), fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    outer_tx = fn.chain(fn.trace(0.9, nesterov=True), fn.scale_by_learning_rate(0.7))
    return fn.chain(fn.average(GRID), fn.outer(inner, outer_tx, fn.compressed_average("node", fn.int8())))


class Case(NamedTuple):
    make: Any
    schedule: Any = None
    lr: float = 1e-2
    more: Mapping[str, Any] = MappingProxyType({})
    dtype: torch.dtype = torch.float32
    axes: tuple[str, ...] = ("data",)
    agreed: str = "always"


GRID = ("local", "node")
COMPRESSED = fn.freeze_after(0)
CASES = {
    "adamw": Case(on(fn.adamw)),
    "onebit_adam": Case(on(fn.onebit_adam), fn.freeze_after(4)),
    "onebit_adam without servers": Case(on(fn.onebit_adam, servers=False), fn.freeze_after(4)),
    "onebit_lamb": Case(on(fn.onebit_lamb), fn.freeze_after(4)),
    "int4": Case(on(int4_adamw), COMPRESSED),
    "sign_muon": Case(on(fn.sign_muon), COMPRESSED, 2e-2),
    "lion_vote": Case(on(fn.lion_vote), COMPRESSED, 1e-3),
    "loco": Case(on(fn.loco_adamw), fn.freeze_after(2)),
    "loco, codes back": Case(on(fn.loco_adamw, gather=fn.int8()), fn.freeze_after(2)),
    "sharded": Case(on(fn.sharded_onebit_adam), fn.freeze_after(4)),
    "owned muon": Case(on(fn.muon), COMPRESSED, 2e-2),
    "owned normuon": Case(on(fn.normuon), COMPRESSED, 2e-2),
    "replicated muon": Case(replicated_muon, None, 2e-2),
    "powersgd": Case(on(fn.powersgd_adamw), fn.freeze_after(3)),
    "dion": Case(on(fn.dion), fn.freeze_after(2)),
    "diloco": Case(on(fn.diloco, codec=fn.int8()), fn.every(3), agreed="exchanges"),
    "muloco": Case(on(fn.muloco, codec=fn.int8()), fn.every(3), agreed="exchanges"),
    "diloco, a late mean": Case(on(fn.diloco, codec=fn.int8()), fn.every(4, delay=2), agreed="exchanges"),
    "late": Case(fn.late(on(fn.adamw)), fn.every(1, delay=1, start=2)),
    "late, clipped": Case(fn.late(on(fn.adamw)), fn.every(1, delay=1, start=2), more={"max_norm": 0.1}),
    "zero_one_adam": Case(on(fn.zero_one_adam), fn.zero_one_schedule(), agreed="exchanges"),
    "adamw, clipped": Case(on(fn.adamw), more={"max_norm": 0.1}),
    "onebit_adam, clipped": Case(on(fn.onebit_adam), fn.freeze_after(4), more={"max_norm": 0.1}),
    "adamw in bfloat16": Case(on(fn.adamw), dtype=torch.bfloat16),
    "onebit_adam in bfloat16": Case(on(fn.onebit_adam), fn.freeze_after(4), dtype=torch.bfloat16),
    "loco in bfloat16": Case(on(fn.loco_adamw), fn.freeze_after(2), dtype=torch.bfloat16),
}
OVER_AXES = {
    "adamw": Case(partial(fn.adamw, axis=GRID), axes=GRID),
    "onebit_adam": Case(partial(fn.onebit_adam, axis=GRID), fn.freeze_after(4), axes=GRID),
    "int4": Case(partial(int4_adamw, axis=GRID), COMPRESSED, axes=GRID),
    "int4 at both hops": Case(partial(int4_adamw, axis=GRID, codec=(fn.int4(), fn.int4())), COMPRESSED, axes=GRID),
    "owned muon": Case(partial(fn.muon, axis=GRID), COMPRESSED, 2e-2, axes=GRID),
    "powersgd": Case(partial(fn.powersgd_adamw, axis=GRID), fn.freeze_after(3), axes=GRID),
    "loco": Case(partial(fn.loco_adamw, axis=GRID), fn.freeze_after(2), axes=GRID),
    "islands": Case(islands, fn.every(3, start=2), axes=GRID, agreed="exchanges"),
}
ALL = CASES | {f"{name} over axes": case for name, case in OVER_AXES.items()}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))


def registered_axis():
    group, size = dist.group.WORLD, dist.get_world_size()

    def gather(x):
        out = x.new_empty((size, *x.shape))
        dist.all_gather_into_tensor(out.view(-1), x.reshape(-1), group=group)
        return out

    def swap(x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    def add(x):
        dist.all_reduce(x, group=group)
        return x

    return Binding(
        {"data": Axis(size, torch.tensor(dist.get_rank()), register("a table", Transport(swap, gather, add)))}
    )


def bound(carrier):
    if carrier == "registered":
        return registered_axis()
    if carrier == "device":  # its library sends each tensor from where it lies
        vars(owners)["carrier_of"] = lambda transport, tensors: Carrier(transport, sends_parts=True)
        vars(owners)["LARGE"] = 256
    if carrier == "grid":
        return fn.bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=GRID[::-1]))
    return fn.bind({"data": dist.group.WORLD}, tcp=carrier == "tcp")


def trained(binding, each, name, batch):
    """Take steps, each inside of `each`; return the params behind every step, as bytes, and the optimizer's count."""
    make, schedule, lr, more, dtype, *_ = ALL[name]
    net = model().to(dtype)
    with binding:
        opt = fn.Optimizer(net.parameters(), make, schedule=schedule, lr=lr, refuse_averaged=False, **more)
    history = []
    for step in range(STEPS):
        opt.zero_grad()
        batch(net, step)
        with each:
            opt.step()
        history.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return history


def data_of(rank):
    generator = torch.Generator().manual_seed(100 + rank)

    def batch(net, step):
        x = torch.randn(16, 8, generator=generator).to(next(net.parameters()).dtype)
        (net(x) - x[:, :4].sin()).square().mean().backward()
        if step == 6 and dist.get_rank() == 1:
            next(net.parameters()).grad.fill_(float("nan"))  # all ranks skip this step

    return batch


def record(carrier):
    # On a thread: in the main one a send of gloo, which stands in for a device's library, is waited for in small times.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(record_all, carrier).result()


def record_all(carrier):
    torch.set_num_threads(1)
    binding, found = bound(carrier), {}
    for name in OVER_AXES if carrier == "grid" else CASES:
        log = []
        each = fn.recorded(binding, lambda step, records, log=log: log.append(records))
        place = name if carrier != "grid" else f"{name} over axes"
        found[name] = trained(binding, each if dist.get_rank() == 0 else binding, place, data_of(dist.get_rank())), log
    return found


@functools.cache
def outcome(carrier):
    return ranks.outcomes(4 if carrier == "grid" else 2, record, carrier, patience=ranks.PATIENCE)[0]


def run(carrier):
    found = outcome(carrier)
    assert isinstance(found, dict), found  # else it is a trace
    return found


def zeros(net, step):
    for p in net.parameters():
        p.grad = torch.zeros_like(p)


def noise(net, step):
    for p in net.parameters():
        p.grad = torch.randn_like(p)


def followed(name, log, batch):
    sizes = dict.fromkeys(ALL[name].axes, 2)
    start, each = fn.replayed(sizes, lambda step: ()), fn.replayed(sizes, lambda step: log[step])
    return trained(start, each, name, batch)


def agreed(name, history):
    if ALL[name].agreed == "always":
        return history
    phases = [ALL[name].schedule(step) for step in range(STEPS)]
    kept = [getattr(phase, "end", phase) not in (None, fn.Phase.LOCAL) for phase in phases]
    return [x for x, keep in zip(history, kept, strict=True) if keep]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batch", [zeros, noise])
def test_a_replay_has_the_params_of_the_run(name, batch):
    history, log = run("tcp")[name] if name in CASES else run("grid")[name.removesuffix(" over axes")]
    torch.manual_seed(3)
    mine = followed(name, log, batch)
    assert sum(leaf.numel() for records in log for _, leaves in records for leaf in leaves) > 0
    for step, (a, b) in enumerate(zip(agreed(name, mine), agreed(name, history), strict=True)):
        assert torch.equal(a, b), step


@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.parametrize("name", CASES)
def test_every_carrier_writes_the_same_log(name, carrier):
    (history, log), (other_history, other) = run("tcp")[name], run(carrier)[name]
    for records, found in zip(log, other, strict=True):
        assert [key for key, _ in found] == [key for key, _ in records]
        assert all(map(torch.equal, *([x for _, leaves in each for x in leaves] for each in (records, found))))
    assert all(map(torch.equal, history, other_history))


def loop(binding, each, gradient, steps=4):
    """Take steps of a pure loop; return the params behind each."""
    tx, params, found = fn.sign_muon(0.1, axis="data"), {"w": torch.ones(8, 4), "b": torch.zeros(4)}, []
    with binding:
        state = tx.init(params)
    for step in range(steps):
        with each:
            updates, state = tx.compressed_update(gradient(step, params), state, params)
            params = fn.apply_updates(params, updates)
        found.append(params)
    return found


def recorded_loop():
    rank, records = dist.get_rank(), []
    binding = fn.bind({"data": dist.group.WORLD})
    generator = torch.Generator().manual_seed(rank)

    def gradient(step, params):
        return {k: torch.randn(p.shape, generator=generator) for k, p in params.items()}

    each = fn.recorded(binding, lambda step, found: records.append((step, found)))
    found = loop(binding, each if rank == 0 else binding, gradient)
    return found, records


def test_a_pure_loop_is_recorded_and_replayed():
    (found, records), (_, none) = ranks.run(2, recorded_loop)
    assert [step for step, _ in records] == [0, 1, 2, 3]
    assert not none
    start = fn.replayed({"data": 2}, lambda step: ())
    each = fn.replayed({"data": 2}, lambda step: records[step][1])
    again = loop(start, each, lambda step, params: {k: torch.randn_like(p) for k, p in params.items()})
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a["w"], b["w"])
        assert torch.equal(a["b"], b["b"])


def means(sizes, log, x=2.0):
    with fn.replayed(sizes, lambda step: log):
        return fn.pmean(torch.full((2,), x), tuple(sizes))


def words(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(torch.uint8)


def test_the_result_comes_from_the_log_whatever_this_rank_has():
    assert means({"data": 2}, [(("sum", 0), [words(1.0, 3.0)])]).tolist() == [0.5, 1.5]
    assert means({"local": 2, "node": 2}, [(("sum", 0), [words(1.0, 3.0)])]).tolist() == [0.25, 0.75]
    with fn.replayed({"data": 2}, lambda step: [(("gather", 0), [words(1.0, 3.0)])]):
        assert fn.all_gather(torch.tensor(7.0), "data").tolist() == [1.0, 3.0]  # its own row, too


@pytest.mark.parametrize(
    ("log", "got"),
    [
        ([], "got none"),
        ([(("sum", 0), [words(1.0)])], r"got \[4\]"),
        ([(("sum", 0), [words(1.0, 2.0)]), (("sum", 1), [words(1.0, 2.0)])], r"got 1 more, such as \('sum', 1\)"),
    ],
)
def test_a_log_of_other_steps_is_refused(log, got):
    with pytest.raises(ValueError, match=rf"source: expected .*{got}; take the same steps"):
        means({"data": 2}, log)


def test_an_entry_that_raises_is_no_step():
    steps = []
    binding = fn.recorded(fn.bind({}), lambda step, records: steps.append(step))
    with pytest.raises(ZeroDivisionError), binding:
        1 / 0  # noqa: B018
    for _ in range(2):
        with binding, binding:
            pass
    assert steps == [0, 1]


def test_traced_code_and_simulated_ranks_are_refused():
    log = [(("sum", 0), [words(2.0, 2.0)])]
    each = fn.replayed({"data": 2}, lambda step: log)
    mean = torch.compile(lambda x: fn.pmean(x, "data"), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"real ranks and eager code, .* code that torch\.compile"), each:
        mean(torch.ones(2))
    with pytest.raises(RuntimeError, match="simulated ranks"), each:
        fn.simulate(lambda x: fn.pmean(x, "node"), "node", 2)(torch.ones(2, 2))


@pytest.mark.parametrize("sizes", [{"data": 0}, {"data": 1.5}])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="axes: expected a number of ranks of 'data'"):
        fn.replayed(sizes, lambda step: ())


def test_functions_and_bindings_are_checked():
    with pytest.raises(TypeError, match=r"sink: expected a function"):
        fn.recorded(fn.bind({}), None)
    with pytest.raises(TypeError, match=r"binding: expected what fn\.bind returns"):
        fn.recorded({}, print)
    with pytest.raises(TypeError, match="axes: expected a mapping"):
        fn.replayed("data", print)
