"""DDP with the communication of `fn`: two gloo ranks, results compared bit for bit with the serial steps."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_cases import Net, Plain, arrays, backward, build, same, train, wrapped
from ranks import Cases, Raised, outcomes
from torch.nn.parallel import DistributedDataParallel

import fn
from fn import Phase
from fn.adapters.ddp import average_gradients, bucketed, keep_local, optimizer, overlap
from fn.adapters.ddp.buckets import split

# All cases run in the same two processes, once.

case = Cases(2)


# One hook for one model.


@case
def hooked() -> list[str]:
    """Everything that hooks into a model, on one that has been hooked into; then on the same module in a new DDP."""
    model, found = wrapped(), []
    ways = (
        lambda model: optimizer(model, fn.onebit_adam, params=model.named_parameters(), schedule=fn.freeze_after(3)),
        keep_local,
        lambda model: overlap(model, build(model)),
        lambda model: average_gradients(model, fn.sign()),
    )
    for use in (ways[0], *ways):
        try:
            use(model)
            found.append("taken")
        except RuntimeError as error:
            found.append(str(error))
    again = DistributedDataParallel(model.module)
    ways[0](again)
    return [*found, "taken"]


def test_a_second_hook_for_a_model_is_refused_with_the_way_out():
    for first, *others, last in case.answer("hooked"):
        assert (first, last) == ("taken", "taken")
        assert len(others) == 4
        for text in others:
            assert text.startswith("model: has a communication hook already")
            assert "wrap the module anew" in text
            assert "several at a time: keep_local(model) once" in text


@case
def several_at_a_time() -> list[list]:
    """Return where a model ends that one optimizer trains in two groups, and one that two optimizers do, kept local."""
    ends = []
    make, schedule = partial(fn.onebit_adam, axis="data"), fn.freeze_after(3)
    for count in (1, 2):
        model = keep_local(wrapped())
        params = list(model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        with fn.bind({"data": dist.group.WORLD}):
            of_each = [groups] if count == 1 else [[group] for group in groups]
            opts = [fn.Optimizer(each, make, schedule=schedule) for each in of_each]
        for t in range(6):
            backward(model, t)
            for opt in opts:
                opt.step()
                opt.zero_grad()
        ends.append(arrays(params))
    return ends


def test_several_optimizers_at_a_time_work_as_that_message_says():
    (one, two), (_, of_the_other_rank) = case.answer("several_at_a_time")
    assert same(one, two)
    assert same(two, of_the_other_rank)


# Steps that are taken ahead.


@case
def thawed() -> list[tuple[list, list, bool]]:
    """A layer that is thawed in the warm-up, and comes in a group of its own."""
    found = []
    for model_of in (wrapped, Plain):
        ends = []
        for ahead in (False, True):
            net = Plain()
            layer = net.layers[2].requires_grad_(False)
            model = wrapped(lambda net=net: net) if model_of is wrapped else net
            opt = build(model)
            if ahead:
                overlap(model, opt, least_wire_seconds=0.0)
            elif model is not net:
                keep_local(model)
            train(model, opt, range(2))
            before = layer.weight.clone()
            layer.requires_grad_(True)
            opt.add_param_group({"params": list(layer.parameters())})
            train(model, opt, range(2, 8))
            ends.append(arrays(list(net.parameters()), opt.states))
        found.append((*ends, not torch.equal(layer.weight, before)))
    return found


def test_a_layer_that_is_thawed_after_ddp_was_made_trains_as_in_serial_steps():
    """Neither DDP nor the hooks of a plain module report its gradients."""
    for found in case.answer("thawed"):
        for serial, ahead, moved in found:
            assert same(serial, ahead)
            assert moved


@case
def thawed_under_average_gradients() -> list[list[str]]:
    net = Plain()
    layer = net.layers[2].requires_grad_(False)
    model = wrapped(lambda: net)
    average_gradients(model, fn.int8())
    found = []
    for thaw in (False, True, True):
        layer.requires_grad_(thaw)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(model, 0)
        found.append([str(w.message) for w in caught])
    return found


def test_a_layer_that_is_thawed_and_that_nobody_averages_is_warned_of_once():
    for before, first, second in case.answer("thawed_under_average_gradients"):
        assert "2 parameters were thawed after DistributedDataParallel was made; nobody averages" in " ".join(first)
        assert not any("thawed" in text for text in before + second)


@case
def joined() -> list[Any]:
    """In `join`, of which rank 1 has a batch more; the optimizer behind backward and in serial steps."""
    found: list[Any] = []
    for least in (0.0, 1e9):
        for stop in (False, True):
            model = wrapped()
            opt = optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(2), least_wire_seconds=least)
            try:
                with model.join(throw_on_early_termination=stop):
                    for step in range(4 + dist.get_rank()):
                        backward(model, step)
                        opt.step()
                        opt.zero_grad()
            except (ValueError, RuntimeError) as error:
                found.append((type(error).__name__, str(error), opt.steps))
            dist.barrier()
            found.append(arrays(list(model.parameters())))
    return found


def test_join_is_refused_unless_it_stops_with_the_first():
    """A rank that has joined takes no steps: its state stayed behind, and so did, later, its parameters."""
    first, second = case.answer("joined")
    assert all(same(first[i], second[i]) for i in (1, 3, 5, 7))
    for found in (first, second):
        for kind, text, steps in (found[0], found[4]):
            assert (kind, steps) == ("ValueError", 0)
            assert "join(throw_on_early_termination=True)" in text
        assert [(kind, steps) for kind, _, steps in (found[2], found[6])] == [("RuntimeError", 4)] * 2


@case
def sparse() -> list[str]:
    found = []
    for use in (overlap, lambda model, opt: average_gradients(model, fn.sign())):
        model = DistributedDataParallel(torch.nn.Embedding(5, 3, sparse=True))
        use(model, build(model))
        try:
            model(torch.tensor([1, 2])).sum().backward()
        except TypeError as error:
            found.append(str(error))
    return found


def test_sparse_gradients_are_refused_before_they_are_sent():
    text = "gradients: expected dense ones, but got a sparse one for the parameter of shape (5, 3); use torch.nn"
    assert [[found.startswith(text) for found in each] for each in case.answer("sparse")] == [[True, True]] * 2


WAYS = [
    ("onebit_adam", 1, False),
    ("lazy", 3, True),
    ("no servers", 1, True),
    ("onebit_lamb", 2, False),
    ("zero_one_adam", 1, True),
]


@case
def both_ways() -> dict[tuple, Any]:
    found = {}
    for name, accumulate, view in WAYS:
        serial = keep_local(wrapped(gradient_as_bucket_view=view))
        ahead = wrapped(gradient_as_bucket_view=view)
        first, second = build(serial, name), build(ahead, name)
        running = overlap(ahead, second, least_wire_seconds=0.0)
        train(serial, first, range(9), accumulate)
        train(ahead, second, range(9), accumulate)
        ends = [arrays(list(m.parameters()), o.states) for m, o in ((serial, first), (ahead, second))]
        found[name] = (*ends, {phase.value: size for phase, size in running.bytes.items()})
    return found


@pytest.mark.parametrize("name", [name for name, _, _ in WAYS])
def test_overlapped_steps_are_bitwise_the_serial_ones_through_all_phases(name):
    for found in case.answer("both_ways"):
        serial, ahead, sent = found[name]
        assert same(serial, ahead)
        assert 0 < sent["compressed"] < sent["warmup"] / 3


@case
def without_a_step() -> tuple[list, list]:
    """A backward pass whose step never comes, and one that adds to its gradients."""
    serial, ahead = keep_local(wrapped()), wrapped()
    first, second = build(serial), build(ahead)
    overlap(ahead, second, least_wire_seconds=0.0)
    for model, opt in ((serial, first), (ahead, second)):
        train(model, opt, range(4))
        backward(model, 4)
        opt.zero_grad()
        backward(model, 5)
        backward(model, 6)
        opt.step()
    return arrays(list(serial.parameters()), first.states), arrays(list(ahead.parameters()), second.states)


def test_what_was_taken_ahead_is_thrown_away_if_its_step_never_comes():
    assert all(same(*ends) for ends in case.answer("without_a_step"))


@case
def unused() -> list[tuple[list, list, bool]]:
    """A layer that has no part until step 2, still in the warm-up."""
    found = []
    models = [keep_local(wrapped(find_unused_parameters=True)), wrapped(find_unused_parameters=True)]
    opts = [build(model) for model in models]
    overlap(models[1], opts[1], least_wire_seconds=0.0)
    for steps in (range(2), range(2, 8)):
        for model, opt in zip(models, opts, strict=True):
            model.module.skip_last = steps.start == 0
            train(model, opt, steps)
        ends = [arrays(list(model.parameters()), opt.states) for model, opt in zip(models, opts, strict=True)]
        still = torch.equal(models[1].module.layers[4].weight, Net().layers[4].weight)
        found.append((*ends, still))
    return found


def test_a_layer_without_a_part_stays_where_it_is_and_can_join_later():
    for without, joined in case.answer("unused"):
        assert same(without[0], without[1])
        assert same(joined[0], joined[1])
        assert (without[2], joined[2]) == (True, False)


@case
def broken_off() -> tuple[list, list]:
    """One group has been sent when the pass breaks off. DDP cannot go on after that, but the step can be taken."""
    serial, ahead = keep_local(wrapped(Plain)), wrapped(Plain)
    first, second = build(serial), build(ahead)
    overlap(ahead, second, least_wire_seconds=0.0)
    for model, opt in ((serial, first), (ahead, second)):
        train(model, opt, range(4))
        backward(model, 4)
        opt.zero_grad(set_to_none=False)
        model.module.break_off(partial(backward, model, 5))
        opt.step()
    return arrays(list(serial.parameters()), first.states), arrays(list(ahead.parameters()), second.states)


def test_a_pass_that_broke_off_counts_as_far_as_it_came():
    assert all(same(*ends) for ends in case.answer("broken_off"))


def broken() -> tuple[str, bool]:
    """Behind a backward pass the codec of the last step fails, on both ranks."""
    calls, sign = [0], fn.sign()

    def encode(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise ArithmeticError("no codes")
        return sign.encode(*args)

    model = wrapped()
    with fn.bind({"data": dist.group.WORLD}):
        codec = sign._replace(encode=encode, fused=None, segmented=None)
        make = partial(fn.onebit_adam, axis="data", codec=codec, servers=False)
        opt = fn.Optimizer(model.parameters(), make, schedule=lambda step: Phase.COMPRESSED if step else Phase.WARMUP)
    overlap(model, opt, least_wire_seconds=0.0)
    train(model, opt, range(1))
    calls[0] = 2
    before = arrays(list(model.parameters()), opt.states)
    backward(model, 1)
    try:
        opt.step()
    except ArithmeticError as error:
        return str(error), same(before, arrays(list(model.parameters()), opt.states))
    return "nothing", False


def test_an_error_behind_backward_is_raised_by_the_step_and_changes_nothing():
    assert outcomes(2, broken) == [("no codes", True)] * 2


def refusal(f: Callable[[], Any]) -> str:
    try:
        f()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing raised"


@case
def refused() -> dict[str, str]:
    found, other = {}, wrapped()
    opt = build(wrapped())
    found["parameters"] = refusal(lambda: overlap(other, opt))
    found["max_norm"] = refusal(lambda: overlap(other, build(other, max_norm=1.0)))
    found["type"] = refusal(lambda: overlap(other, torch.optim.SGD(other.parameters())))
    found["axis"] = refusal(lambda: overlap(other, fn.Optimizer(other.parameters(), fn.adamw)))
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("parameters", "optimizer: parameter 0 of param group 0 is none of the model's"),
        ("max_norm", "optimizer: clips by max_norm"),
        ("type", "optimizer: expected an fn.Optimizer, but got SGD"),
        ("axis", "ranks, but got the axes {}"),
    ],
)
def test_what_overlap_cannot_do_is_refused_with_the_reason(name, text):
    assert all(text in found[name] for found in case.answer("refused"))


@case
def changed() -> list[bool]:
    """Between backward and step comes another learning rate, another momentum, or a checkpoint."""
    ways = (
        lambda opt: opt.param_groups[0].update(lr=0.5),
        lambda opt: opt.param_groups[-1].update(betas=(0.5, 0.9)),
        lambda opt: opt.load_state_dict({path: x.clone() for path, x in opt.state_dict().items()}),
    )
    found = []
    for change in ways:
        serial, ahead = keep_local(wrapped()), wrapped()
        first, second = build(serial), build(ahead)
        overlap(ahead, second, least_wire_seconds=0.0)
        for model, opt in ((serial, first), (ahead, second)):
            train(model, opt, range(5))
            backward(model, 5)
            change(opt)
            opt.step()
            opt.zero_grad()
            train(model, opt, range(6, 8))
        found.append(same(*(arrays(list(m.parameters()), o.states) for m, o in ((serial, first), (ahead, second)))))
    return found


def test_what_was_taken_ahead_is_thrown_away_if_its_settings_or_its_state_change():
    assert case.answer("changed") == [[True, True, True]] * 2


def scaled() -> str:
    model = wrapped()
    opt = build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 12)).sum()).backward()
    return refusal(lambda: scaler.step(opt))


def test_a_scaler_that_nobody_was_told_of_is_refused():
    text = "scaler: scales the loss, but overlap does not know it; pass overlap(..., scaler=scaler)"
    assert outcomes(2, scaled) == [text] * 2


@case
def left_out() -> list[list[str]]:
    """What is said where an optimizer has all parameters, and where it has only weights."""
    found: list[list[str]] = []
    for weights_only, max_norm in ((False, None), (True, None), (True, 1.0)):
        model = wrapped()
        params = [p for p in model.parameters() if p.ndim > 1 or not weights_only]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer(model, fn.onebit_adam, params=params, schedule=fn.freeze_after(2), max_norm=max_norm)
        found.append([str(w.message) for w in caught])
    return found


def test_parameters_that_no_optimizer_averages_are_warned_of():
    for all_of_them, behind_backward, clipped in case.answer("left_out"):
        assert all_of_them == []
        for texts in (behind_backward, clipped):
            (text,) = texts
            assert text.startswith("params: 5 of the model's that require gradients, 'layers.0.bias' for one, are not")


@case
def on_a_fast_wire() -> tuple[list, list, list[str], bool]:
    serial, ahead = keep_local(wrapped()), wrapped()
    first, second = build(serial), build(ahead)
    running = overlap(ahead, second)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fn").addHandler(handler)
    train(serial, first, range(7))
    train(ahead, second, range(7))
    ends = [arrays(list(m.parameters()), o.states) for m, o in ((serial, first), (ahead, second))]
    return *ends, said, any(running.is_on(phase) for phase in Phase)


def test_overlap_switches_itself_off_on_a_fast_wire_and_says_so():
    for rank, (serial, ahead, said, on) in enumerate(case.answer("on_a_fast_wire")):
        assert same(serial, ahead)
        assert not on
        expected = [f"overlap is off in the {phase} phase:" for phase in ("warmup", "compressed")]
        assert rank or [text.partition(":")[0] + ":" for text in said] == expected


# Gradients that are averaged in codes.

CODECS = {
    "LoCo": (fn.int4, partial(fn.damped, 0.8, 4)),
    "int8": (fn.int8, fn.off),
    "sign": (fn.sign, fn.classic),
    "sign, no servers": (fn.sign, fn.classic),
}


def by_hand(codec: str, accumulate: int) -> list:
    """The same with pure functions: gradients of each rank's own, then the compressed mean of each bucket."""
    model = keep_local(wrapped())
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    make, feedback = CODECS[codec]
    link = fn.compressed_average("data", make(), feedback(), servers="no servers" not in codec)
    tx = fn.chain(fn.average("data"), link)
    buckets = split(list(model.parameters()), 300)
    with fn.bind({"data": dist.group.WORLD}), torch.no_grad():
        states = [tx.init([p.detach() for p in bucket]) for bucket in buckets]
        for t in range(7):
            with torch.enable_grad():
                backward(model, t, accumulate)
            for i, bucket in enumerate(buckets):
                update = tx.update(fn.freeze_after(3)(t))
                means, states[i] = update([p.grad for p in bucket], states[i], bucket)
                for p, mean in zip(bucket, means, strict=True):
                    p.grad.copy_(mean)
            opt.step()
            opt.zero_grad()
    return arrays(list(model.parameters()), states)


@case
def in_codes() -> dict[str, Any]:
    found = {}
    for codec, accumulate in (("LoCo", 1), ("int8", 2), ("sign", 3), ("sign, no servers", 1)):
        model = wrapped(gradient_as_bucket_view=codec == "int8")
        make, feedback = CODECS[codec]
        how = {"schedule": fn.freeze_after(3), "elements": 300, "servers": "no servers" not in codec}
        running = average_gradients(model, make(), feedback(), **how)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(7), accumulate)
        ends = arrays(list(model.parameters()), running.states), by_hand(codec, accumulate)
        found[codec] = (*ends, arrays(list(model.parameters())), running.bytes[Phase.COMPRESSED], running.steps)
    return found


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_averaged_gradients_are_bitwise_those_of_the_pure_functions(codec):
    """Through DDP's rearrangement of its buckets, so the errors outlive it."""
    first, second = (found[codec] for found in case.answer("in_codes"))
    for found, expected, _, sent, steps in (first, second):
        assert same(found, expected)
        assert 0 < sent < 4 * sum(p.numel() for p in Net().parameters()) / 2
        assert steps == 7
    assert same(first[2], second[2])


@case
def averaged_and_resumed() -> tuple[list, ...]:
    def start(saved: dict | None = None, weights: dict | None = None):
        model = wrapped()
        if weights is not None:
            model.load_state_dict(weights)
        mean = average_gradients(model, fn.sign(), schedule=fn.freeze_after(2), elements=300)
        if saved is not None:
            mean.load_state_dict(saved)
        return model, mean, torch.optim.SGD(model.parameters(), lr=0.05)

    model, mean, opt = start()
    train(model, opt, range(5))
    here, there = (f"of rank {rank} of 2" for rank in (dist.get_rank(), 1 - dist.get_rank()))
    of_another = {path.replace(here, there): x for path, x in mean.state_dict().items()}
    with pytest.raises(ValueError, match=f"the state {here}, but got the state {there};"):
        mean.load_state_dict(of_another)
    copy, resumed, other = start(mean.state_dict(), {k: v.clone() for k, v in model.state_dict().items()})
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        dcp.save({"mean": mean}, checkpoint_id=folders[0])
        third, read, last = start(weights={k: v.clone() for k, v in model.state_dict().items()})
        dcp.load({"mean": read}, checkpoint_id=folders[0])
        dist.barrier()
    ends = []
    for trained, own, by in ((model, mean, opt), (copy, resumed, other), (third, read, last)):
        train(trained, by, range(5, 8))
        ends.append(arrays(list(trained.parameters()), own.states))
    return tuple(ends)


def test_averaged_gradients_continue_bit_for_bit():
    """From a state dict, and from torch.distributed.checkpoint, which keeps the errors of all ranks."""
    for went_on, resumed, read in case.answer("averaged_and_resumed"):
        assert same(went_on, resumed)
        assert same(went_on, read)


@case
def local_schedule() -> str:
    model = wrapped()
    average_gradients(model, fn.sign(), schedule=lambda step: Phase.LOCAL)
    return refusal(lambda: backward(model, 0))


def test_averaged_gradients_have_no_local_phase():
    assert all("schedule: asks for the local phase" in text for text in case.answer("local_schedule"))


# Gradients that DDP has averaged already.


def with_plain_ddp(allowed: bool) -> int:
    model = wrapped()
    opt = build(model, refuse_averaged=not allowed)
    train(model, opt, range(5))
    return opt.steps


def test_gradients_that_ddp_averaged_are_refused_in_the_compressed_phase_on_all_ranks():
    for found in outcomes(2, with_plain_ddp, False):
        assert isinstance(found, Raised)
        assert found.kind == "RefusedByAll"
        assert "averaged already" in found.text
        assert "keep_local" in found.text


@case
def allowed_to_be_averaged() -> int:
    return with_plain_ddp(True)


def test_gradients_that_are_the_same_on_purpose_are_allowed():
    assert case.answer("allowed_to_be_averaged") == [5, 5]


# Arguments, on no rank.


@pytest.mark.parametrize("f", [keep_local, partial(average_gradients, codec=fn.sign())])
def test_a_model_that_is_not_in_ddp_is_refused(f):
    with pytest.raises(TypeError, match="model: expected a DistributedDataParallel, but got Net"):
        f(Net())


@pytest.mark.parametrize("through_compile", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_plain_module_in_a_single_process_takes_the_steps_of_one_rank(through_compile, max_norm):
    """accelerate does not wrap a model there, and the same script ended in a TypeError."""
    options: Any = {"schedule": fn.freeze_after(2), "lr": 0.01, "max_norm": max_norm}
    ends = []
    for alone in (False, True):
        net = Net()
        model = torch.compile(net, backend="eager") if through_compile else net
        if alone:
            opt = optimizer(model, fn.onebit_adam, elements=300, **options)
        else:
            opt = fn.Optimizer(bucketed(net.parameters(), 300), partial(fn.onebit_adam, axis="data"), **options)
        for t in range(5):
            model(torch.randn(4, 12, generator=torch.Generator().manual_seed(t))).square().mean().backward()
            opt.step()
            opt.zero_grad()
        ends.append([opt.steps, len(opt.param_groups), *arrays(list(net.parameters()))])
    assert ends[0][:2] == ends[1][:2]
    assert same(ends[0][2:], ends[1][2:])


@case
def plain_on_several_ranks() -> str:
    with pytest.raises(TypeError) as raised:
        optimizer(Net(), fn.onebit_adam, schedule=fn.freeze_after(2))
    return str(raised.value)


def test_where_there_are_several_ranks_a_plain_module_is_refused(monkeypatch):
    """That DDP was forgotten stays a mistake, also before a process group is there."""
    text = "model: expected a DistributedDataParallel, but got Net"
    assert case.answer("plain_on_several_ranks") == [text] * 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match=text):
        optimizer(Net(), fn.onebit_adam, schedule=fn.freeze_after(2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(TypeError, match=r"model: expected .*, but got list"):
        optimizer([], fn.onebit_adam)
    with pytest.raises(TypeError, match=r"make: expected a function .*, but got a transform that is made already"):
        optimizer(Net(), fn.adamw(0.1))


def test_bucketed_keeps_groups_and_hyper_parameters_and_every_parameter_once():
    net = Net()
    params = list(net.parameters())
    groups = bucketed([{"params": params[:4], "lr": 0.5}, {"params": params[4:]}], 400)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, params))
    for group in groups:
        inside = {id(p) for p in params[:4]} >= {id(p) for p in group["params"]}
        assert (group.get("lr") == 0.5) == inside


@pytest.mark.parametrize("grouped", [False, True])
def test_bucketed_keeps_the_names_of_parameters(grouped):
    net = Net()
    named = list(net.named_parameters())
    groups = bucketed([{"params": iter(named), "name": "net"}] if grouped else net.named_parameters(), 400)
    assert len(groups) > 1
    found = torch.optim.SGD(groups, 0.1).param_groups
    known = {(name, id(p)) for name, p in named}
    assert {(n, id(p)) for g in found for n, p in zip(g["param_names"], g["params"], strict=True)} == known
    assert [g.get("name") for g in found] == ["net" if grouped else None] * len(groups)


@pytest.mark.parametrize(("params", "elements", "kind"), [([torch.ones(2)], 0, ValueError), ([("w", 1)], 8, TypeError)])
def test_bucketed_refuses_by_name(params, elements, kind):
    with pytest.raises(kind, match=r"elements: .*but got 0|params: .*but got tuple"):
        bucketed(params, elements)
