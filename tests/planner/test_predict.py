"""Seconds: the cost of collectives, overlap, the ranking, and what others have published."""

from __future__ import annotations

import pytest

import fn
from fn.planner import traffic
from fn.planner.methods import Method, method, methods, rows
from fn.planner.network import Cost, Message, duration, network
from fn.planner.predict import FORWARD, Rates, plan, predict
from fn.planner.recommend import recommend

FLAT = network(4, 4, Cost(1e-3, 8e6))  # a millisecond a message, a byte a microsecond
NODES = network(8, 4, Cost(1e-6, 8e9), Cost(1e-3, 8e6))


def planned(params, net, compute, width=4, **more):
    return plan(methods(traffic.model(params, width=width), net), net, compute, params, memory=1.6e13, **more)


@pytest.mark.parametrize(
    ("message", "net", "time"),
    [
        (Message("data", "all_to_all", 3000), FLAT, 3e-3 + 3e-3),
        (Message("data", "all_gather", 3000), FLAT, 3e-3 + 3e-3),
        (Message("data", "all_reduce", 300_000), FLAT, 6e-3 + 0.3),  # a ring
        (Message("data", "all_reduce", 3000), FLAT, 4e-3 + 4e-3),  # a tree has fewer messages
        (Message("local", "all_gather", 3000), NODES, 3e-6 + 3e-6),
        (Message("node", "all_gather", 3000), NODES, 1e-3 + 4 * 3e-3),  # four groups share a node's link
        (Message("data", "all_to_all", 7000), NODES, 3e-6 + 4e-3 + 4 * 4e-3),  # 4 of 7 rows leave the node
        (Message("data", "all_gather", 7000), NODES, 7e-3 + 7e-3),  # a ring leaves each node once
    ],
)
def test_what_a_collective_takes(message, net, time):
    assert duration(message, net) == pytest.approx(time)


def test_a_single_rank_sends_nothing_and_needs_nothing():
    net = network(1, 1, Cost(1e-3, 8e6))
    found = planned(10**6, net, 0.1)
    assert recommend(found).take is None
    assert {p.step for p in found.predictions} == {0.1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((10, 4, Cost(0, 1)), "world"), ((0, 1, Cost(0, 1)), "world"), ((8, 4, Cost(0, 1)), "inter: is missing")],
)
def test_networks_that_cannot_be(arguments, said):
    with pytest.raises(ValueError, match=said):
        network(*arguments)


def part(fraction, size):
    return fraction, (Message("data", "all_gather", size),)


def test_what_the_backward_pass_hides():
    """Messages of 6 ms each (3 of latency), gradients ready half-way through the backward pass and at its end."""
    two = (part(0.5, 3000), part(0.5, 3000))
    serial = predict(Method("m", "flat", True, two, False), FLAT, 0.09, 0.001)
    assert (serial.communication, serial.exposed) == pytest.approx((0.012, 0.012))
    assert serial.step == pytest.approx(0.103)
    hidden = predict(Method("m", "flat", True, two, True), FLAT, 0.09, 0.001)
    assert hidden.exposed == pytest.approx(0.006)  # the last part's
    late = predict(Method("m", "flat", True, (part(0.5, 99_000), part(0.5, 3000)), True), FLAT, 0.09, 0.0)
    assert late.exposed == pytest.approx(FORWARD * 0.09 + 0.03 + 0.102 + 0.006 - 0.09)  # the link is never free
    assert late.limit == pytest.approx(0.108)


def test_a_method_that_communicates_rarely_costs_the_mean():
    once = predict(Method("m", "flat", True, (part(1.0, 3000),), False, interval=4), FLAT, 0.1, 0.004)
    assert once.step == pytest.approx(0.1 + 0.006 / 4 + 0.001)


def test_a_slow_link_pays_and_nvlink_does_not():
    slow = planned(1_300_000_000, network(64, 8, Cost(5e-6, 9e11), Cost(3e-5, 1e10)), 0.35)
    assert recommend(slow).why.startswith("Compression pays:")
    assert slow.of("adamw").step / slow.of("onebit_adam").step > 5
    nvlink = planned(1_300_000_000, network(8, 8, Cost(5e-6, 7.2e12)), 0.35)
    assert recommend(nvlink).why.startswith("Compression does not pay here:")


def test_coding_that_costs_more_than_it_saves_does_not_pay():
    net = network(2, 2, Cost(1e-6, 1e11))
    names = [method.name for method in methods(traffic.model(10**8), net) if method.compressed]
    found = planned(10**8, net, 0.001, coding=dict.fromkeys(names, 1.0))
    assert recommend(found).take is None


ONEBIT = {
    "onebit_adam",
    "onebit_adam, overlapped",
    "onebit_adam, servers=False",
    "onebit_adam, servers=False, overlapped",
}


def first_onebit(net):
    """Return the name of 1-bit Adam's fastest prediction, and all predictions."""
    found = planned(10**8, net, 0.1)
    return next(p.method.name for p in found.predictions if p.method.name in ONEBIT), found


@pytest.mark.parametrize(
    ("net", "topology"),
    [
        (network(2, 1, Cost(1e-3, 1e9), Cost(1e-3, 1e9)), "flat"),
        (network(2, 2, Cost(3e-5, 1e8)), "flat"),
        (network(16, 8, Cost(5e-6, 9e11), Cost(1e-3, 1e10)), "two-level"),
    ],
    ids=["two ranks", "a very slow link", "two nodes"],
)
def test_two_ranks_or_nodes_on_a_slow_link_need_no_servers(net, topology):
    name, found = first_onebit(net)
    assert "servers=False" in name
    assert found.of(name).method.topology == topology
    for overlapped in ("", ", overlapped"):
        direct, through = (found.of(f"onebit_adam{kind}{overlapped}", topology) for kind in (", servers=False", ""))
        assert direct.step < through.step
        assert direct.coding < through.coding
        assert direct.method.size == pytest.approx(through.method.size, rel=0.04)  # codes of both nodes go on in each


@pytest.mark.parametrize(
    "net",
    [
        network(8, 1, Cost(3e-5, 1e9), Cost(3e-5, 1e9)),
        network(64, 8, Cost(5e-6, 9e11), Cost(3e-5, 1e10)),
        network(4096, 8, Cost(5e-6, 9e11), Cost(3e-5, 2.5e10)),
    ],
    ids=["8 ranks", "8 nodes", "512 nodes"],
)
def test_many_ranks_or_nodes_need_servers(net):
    name, found = first_onebit(net)
    assert "servers=False" not in name
    for overlapped in ("", ", overlapped"):
        direct, through = (found.of(f"onebit_adam{kind}{overlapped}") for kind in (", servers=False", ""))
        assert direct.step > through.step


def test_bert_large_on_64_gpus_and_ethernet():
    """1-bit Adam's profile (arXiv 2102.02888, table 1): 94 % of a step of BERT-Large is all-reduce.

    40 Gbit Ethernet, of which the authors measured 4.1 Gbit/s with iperf; nodes of 4 V100; 145 ms of computation.
    """
    net = network(64, 4, Cost(5e-6, 3e11), Cost(3e-5, 4.1e9))
    found = planned(340_000_000, net, 0.145, width=2)
    exact = found.of("adamw", "flat")
    share = exact.communication / (exact.communication + exact.compute)
    assert share == pytest.approx(0.94, rel=0.05)
    assert exact.communication == pytest.approx(2.2, rel=0.25)
    assert recommend(found).take is not None


def test_a_delay_hides_what_is_sent_meanwhile_and_no_more():
    def of(delay):
        return predict(Method("m", "flat", True, (part(1.0, 3000),), False, interval=4, delay=delay), FLAT, 0.1, 0.0)

    sent = of(0).communication * 4
    for delay in (0, 1, 2, 100):
        assert of(delay).step == pytest.approx(0.1 + max(0.0, sent - delay * 0.1) / 4)


def test_what_leaves_in_fragments_is_hidden_fragment_by_fragment():
    """A fragment may take as long as its delay; one that takes longer is waited for, whatever the others take."""
    whole, halves = (part(1.0, 6000),), (part(0.5, 3000), part(0.5, 3000))
    one, two = (predict(Method("m", "flat", True, parts, False, interval=4, delay=1), FLAT, 0.006, 0.0)
                for parts in (whole, halves))  # fmt: skip
    assert one.exposed == pytest.approx(0.003 / 4)
    assert two.exposed == pytest.approx(0.0)
    assert two.communication == pytest.approx(0.012 / 4)


@pytest.mark.parametrize("parts", [(part(1.0, 6000),), (part(0.5, 6000), part(0.5, 6000))], ids=["whole", "halves"])
@pytest.mark.parametrize("delay", [4, 8])
def test_what_is_a_round_late_and_later_is_hidden_as_far_as_the_link_sends_a_round_in_a_round(parts, delay):
    for compute in (0.1, 0.002, 0.0001):
        found = predict(Method("m", "flat", True, parts, False, interval=4, delay=delay), FLAT, compute, 0.0)
        assert found.step == pytest.approx(max(compute, len(parts) * 0.009 / 4))


def test_exact_means_in_every_step_come_on_top_of_a_round():
    each = (part(0.5, 3000), part(0.5, 3000))
    method = Method("m", "two-level", True, (part(1.0, 3000),), False, interval=4, each_step=each)
    found = predict(method, FLAT, 0.09, 0.0)
    assert found.communication == pytest.approx(0.012 + 0.006 / 4)
    assert found.exposed == pytest.approx(0.006 + 0.006 / 4)  # the last part of each step, and the round's
    assert found.method.size == 6000 + 3000 / 4


def test_what_is_exact_in_one_step_of_so_many_counts_in_the_mean():
    exact = (Message("data", "all_reduce", 30_000),)
    method = Method("m", "flat", True, (part(1.0, 3000),), False, exact=exact, period=5)
    found = predict(method, FLAT, 0.1, 0.01)
    assert found.method.size == 0.8 * 3000 + 30_000 / 5
    every = [predict(method._replace(exact=(), period=0, parts=parts), FLAT, 0.1, 0.01).communication
             for parts in (method.parts, ((1.0, exact),))]  # fmt: skip
    assert found.communication == found.exposed == pytest.approx(0.8 * every[0] + 0.2 * every[1])
    assert found.coding == pytest.approx(0.008)
    assert found.method.in_every_step


def test_a_mean_that_is_late_by_all_of_a_round_but_a_step_hides_an_exchange_of_a_round():
    """Of 124 million numbers 124 MB travel: in 43 steps of a second it is done, in a quarter of them it is not."""
    net = network(2, 1, Cost(40e-3, 2.5e7), Cost(40e-3, 2.5e7))
    found = plan(methods(traffic.model(124_000_000), net, local_steps=44), net, 1.0, 124_000_000, memory=1.6e13)
    late, delayed, at_once = (found.of(f"diloco, int8{kind}") for kind in (", late", ", delayed", ""))
    assert late.communication == delayed.communication == at_once.communication == pytest.approx(40 / 44, rel=0.02)
    assert (late.exposed, late.step) == (0.0, pytest.approx(1.0, rel=0.01))
    assert delayed.exposed == pytest.approx(at_once.exposed - 11 / 44)


def test_a_plan_knows_optimizers_by_every_name():
    found = planned(10**8, NODES, 0.1)
    assert found.of("lamb") == found.of("adamw")
    assert found.of("local_sgd", "flat") == found.of("diloco", "flat")
    assert found.of("muloco", "flat").method.parts == found.of("diloco", "flat").method.parts
    assert found.of("dion").method.name == "dion, rank 1/4"
    assert found.of("onebit_adam").method.name == "onebit_adam"
    assert found.of("onebit_adam, 1 bit").method.name == "onebit_adam, 1 bit"
    for name in fn.__all__:
        if getattr(getattr(fn, name), "__module__", "").endswith("optimizers"):
            assert found.of(name).step > 0.1


def test_ranks_of_factors_and_density_are_what_is_sent():
    squares = traffic.model(10**8, tensors=150, share=1.0)
    few, many = (
        {m.name: m.size for m in methods(squares, FLAT, rank=rank, density=density)}
        for rank, density in ((1, 1 / 1024), (8, 1 / 64))
    )
    assert many["powersgd_adamw, rank 8"] == pytest.approx(8 * few["powersgd_adamw, rank 1"], rel=1e-3)
    assert many["dion, rank 8"] == many["powersgd_adamw, rank 8"]
    assert many["sparse_loco"] == pytest.approx(16 * few["sparse_loco"], rel=0.1)


def test_owned_over_two_axes_takes_adamws_step_and_a_quarter_of_one_axis_in_codes():
    eight_nodes = network(64, 8, Cost(5e-6, 9e11), Cost(3e-5, 1e10))
    found = planned(1_300_000_000, eight_nodes, 0.35)
    steps = {(p.method.name, p.method.topology): p.step for p in found.predictions}
    assert steps["muon, int8", "two-level"] < 2.4 < 8 < steps["muon, int8", "flat"]
    assert steps["muon", "two-level"] == pytest.approx(steps["adamw", "two-level"], rel=0.05)
    assert steps["muon", "flat"] > 30


def test_a_late_message_travels_behind_the_whole_next_step():
    """max(computation + coding, coding + communication), and the outer step is part of the coding."""
    for compute, message in ((0.1, 3000), (0.001, 30000)):
        parts = (part(1.0, message),)
        late = predict(Method("m, late", "flat", True, parts, False, delay=1), FLAT, compute, 0.004)
        alone = predict(Method("m", "flat", True, parts, False), FLAT, compute, 0.004).communication
        assert late.step == pytest.approx(max(compute + 0.004, 0.004 + alone))
        assert not late.method.in_every_step


def test_a_methods_own_time_orders_the_steps_of_a_small_model():
    """README's script on one host: nothing is to be gained from fewer bytes, and Python is what costs."""
    model = traffic.of_shapes([(128, 16), (128,), (128, 128), (128,), (1, 128), (1,)], 4)
    found = plan(methods(model, net := network(2, 2, Cost(5e-6, 1e10))), net, 4e-3, model.params, memory=1.6e13)
    exact, coded, votes = (found.of(name).step for name in ("adamw", "adamw, int4 gradients", "sign_muon"))
    assert exact < coded < votes
    assert found.of("diloco").step < found.of("muloco").step


def test_own_time_is_calls_and_products_at_the_rates_of_a_device():
    net = network(4, 4, Cost(0.0, 1e12))
    model = traffic.of_shapes([(64, 256), (2, 32, 16), (99,)], 4, [True, True, False])
    made = {m.name: m for m in methods(model, net)}
    square = 5 * (4 * 64 * 64 * 256 + 2 * 64**3) + 2 * 5 * (4 * 16 * 16 * 32 + 2 * 16**3)
    assert made["sign_muon"].flops == made["muloco"].flops == square
    assert made["muon"].flops == square / 4  # each matrix has an owner
    assert made["adamw"].flops == 0
    (each,) = {made[name].calls for name in ("sign_muon", "sign_muon, late")}
    slow = Rates(1e12, call=1e-3, flops=square)
    found = plan([*made.values()], net, 0.1, model.params, memory=1e12, rates=slow).of("sign_muon")
    assert found.own == pytest.approx(each * 1e-3 + 1)
    assert found.step == pytest.approx(found.compute + found.exposed + found.coding + found.own)


def test_a_step_that_was_measured_takes_the_place_of_what_is_predicted():
    made = planned(10**8, FLAT, 0.1)
    found = planned(10**8, FLAT, 0.1, steps={"adamw": 0.3, "sign_muon": 0.2}, own={"diloco": 0.5})
    for name, step in (("adamw", 0.3), ("sign_muon", 0.2)):
        p = found.of(name)
        assert (p.step, p.predicted, p.measured) == (pytest.approx(step), made.of(name).step, True)
    assert found.base.step == pytest.approx(0.3)
    assert found.of("diloco").step == pytest.approx(made.of("diloco").step - made.of("diloco").own + 0.5)
    assert not found.of("diloco").measured
    assert [p.step for p in found.predictions] == sorted(p.step for p in found.predictions)


def early(muon: Method) -> Method:
    """Return Muon on shards whose matrices leave for their owners with the bucket of their gradients."""
    there, *rest = [m for m in muon.messages if m.collective == "all_to_all"]
    behind = [(part, (*sent, there._replace(size=round(there.size * part)))) for part, sent in muon.each_step]
    flag = [m for m in muon.messages if m.collective != "all_to_all"]
    return muon._replace(each_step=tuple(behind), parts=((1.0, (*flag, *rest)),))


@pytest.mark.parametrize(("nodes", "most"), [(1, 0.005), (8, 0.0)])
def test_matrices_that_leave_behind_the_backward_pass_save_as_little_as_the_page_says(nodes, most):
    """In a node 4 of 366 ms; between nodes FSDP2's own messages have the link, and more messages take longer."""
    model, net = traffic.model(1_300_000_000), network(8 * nodes, 8, Cost(5e-6, 900e9), Cost(5e-6, 400e9))
    (row,) = [row for row in rows() if row.name == "muon, FSDP2"]
    for ranks in [8] if nodes == 1 else [64, (8, 8)]:
        made = method(row, model, ranks)
        now, then = (predict(m, net, 0.35, 0.0).step for m in (made, early(made)))
        assert now - then <= most
        if nodes == 1:
            assert (round(now - then, 3), round(now, 3)) == (0.004, 0.366)
