"""From how many ranks on another method is the fastest: what is said is what the planner says of each number."""

from __future__ import annotations

import pytest

from fn.planner import traffic
from fn.planner.methods import methods
from fn.planner.network import Cost, network
from fn.planner.predict import WORTH, fastest_by_ranks, numbers_of_ranks, plan, sentence, with_ranks

MODEL = traffic.model(10**8)
FLAT = network(2, 1, Cost(3e-5, 1e9), Cost(3e-5, 1e9))
NODES = network(64, 8, Cost(5e-6, 9e11), Cost(3e-5, 1e10))


def plan_on(net):
    return plan(methods(MODEL, net), net, 0.1, MODEL.params, memory=1.6e13)


def test_ranks_are_doubled_in_parts_of_a_node_and_in_whole_nodes():
    assert numbers_of_ranks(FLAT, 20) == [2, 4, 8, 16]
    assert numbers_of_ranks(NODES, 40) == [2, 4, 8, 16, 32]
    assert numbers_of_ranks(network(12, 6, Cost(0, 1), Cost(0, 1)), 30) == [2, 4, 6, 12, 24]


def test_without_links_between_nodes_nothing_is_asked_of_more_than_one():
    assert numbers_of_ranks(network(6, 6, Cost(0, 1))) == [2, 4, 6]
    assert numbers_of_ranks(network(8192, 8192, Cost(0, 1)))[-1] == 8192


def test_part_of_a_node_has_no_links_to_others():
    small = with_ranks(NODES, 4)
    assert (small.world, small.per_node, small.nodes) == (4, 4, 1)
    assert with_ranks(NODES, 4096).nodes == 512


@pytest.mark.parametrize("net", [FLAT, NODES])
def test_on_every_number_of_ranks_nothing_else_is_clearly_faster(net):
    found = fastest_by_ranks(plan_on, net, 256)
    names = {}
    for world in numbers_of_ranks(net, 256):
        (names[world],) = [p for start, p in found if start == max(s for s, _ in found if s <= world)]
        here = plan_on(with_ranks(net, world))
        chosen = here.of(names[world].method.name, names[world].method.topology)
        rest = [p.step for p in here.predictions if p.method.in_every_step]
        assert min(rest) > (1 - WORTH) * chosen.step or chosen.step == min(rest)
        assert chosen.method.in_every_step


def test_servers_win_from_some_number_of_ranks_on():
    """Without 0/1 Adam, which communicates rarely, 1-bit Adam's two ways are left."""

    def of_onebit(net):
        found = [m for m in methods(MODEL, net) if m.name in ("onebit_adam", "onebit_adam, servers=False")]
        exact = [m for m in methods(MODEL, net) if m.name == "adamw"]
        return plan(found + exact, net, 0.1, MODEL.params, memory=1.6e13)

    found = fastest_by_ranks(of_onebit, FLAT)
    assert [p.method.name for _, p in found] == ["onebit_adam, servers=False", "onebit_adam"]
    said = sentence(found, 4096)
    assert said == (
        f"Fastest with these links, synchronising in every step: onebit_adam, servers=False below {found[1][0]} ranks; "
        f"onebit_adam from {found[1][0]} on."
    )
    assert sentence(found[:1], 4096).endswith("onebit_adam, servers=False on 2 to 4,096 ranks.")
