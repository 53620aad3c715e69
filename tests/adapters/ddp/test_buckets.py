"""What travels together, and when it leaves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fn.adapters.ddp.backward_pass import Arrivals, leaving_order
from fn.adapters.ddp.buckets import SHARE, split


def parameters(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(n, requires_grad=True) for n in sizes]


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(sizes, st.integers(1, 30))
def test_splitting_keeps_every_parameter_once_from_the_end_in_parcels_that_are_large_enough(numbers, elements):
    params = parameters(numbers)
    buckets = split(params, elements)
    assert [id(p) for bucket in reversed(buckets) for p in bucket] == [id(p) for p in params]
    for i, bucket in enumerate(buckets[:-1]):
        left = sum(p.numel() for later in buckets[i:] for p in later)
        size, before_the_last = sum(p.numel() for p in bucket), sum(p.numel() for p in bucket[1:])
        first = elements / 3 if sum(numbers) > elements else elements
        enough = first if i == 0 else min(elements, max(left * SHARE, elements / 4))
        assert size >= enough
        assert left - size > elements / 8
        assert before_the_last < enough  # it was closed as soon as it was large enough


def test_the_last_parcels_are_smaller_and_a_small_rest_goes_with_the_one_before():
    def sized(count: int) -> list[int]:
        return [sum(p.numel() for p in bucket) for bucket in split(parameters([1] * count), 20)]

    assert sized(100) == [7, 20, 19, 14, 10, 8, 6, 5, 5, 6]
    assert sized(20) == [20]
    assert sized(21) == [7, 5, 5, 4]


@given(sizes, st.integers(1, 12), st.randoms())
def test_whatever_the_order_of_arrival_every_parcel_leaves_once_complete_and_in_order(numbers, count, random):
    params = parameters(numbers)
    labels = [random.randrange(count) for _ in params]
    buckets = [[p for p, label in zip(params, labels, strict=True) if label == i] for i in range(count)]
    order = leaving_order(buckets, params)
    arrivals, left, arrived = Arrivals(buckets, order), [], set()
    shuffled = random.sample(range(len(params)), len(params))
    for i in shuffled:
        arrived.add(id(params[i]))
        ready = arrivals.add([params[i]], [torch.full_like(params[i], i)])
        assert all(id(p) in arrived for bucket in ready for p in buckets[bucket])
        left += ready
    assert left == order
    assert arrivals.rest() == []
    position = {id(p): i for i, p in enumerate(params)}
    for bucket, members in enumerate(buckets):
        assert [g.tolist() for g in arrivals.grads(bucket)] == [[float(position[id(p)])] * p.numel() for p in members]


def test_a_parcel_waits_for_the_one_before_it_and_for_the_end_if_a_gradient_never_comes():
    a, b, c = parameters([2, 3, 4])
    frozen = torch.zeros(5)
    arrivals = Arrivals([[a, frozen], [b], [c]], [2, 1, 0])
    assert arrivals.add([b], [torch.ones(3)]) == []
    assert arrivals.add([a], [torch.ones(2)]) == []
    assert arrivals.add([torch.zeros(1)], [torch.ones(1)]) == []
    assert arrivals.rest() == [2, 1, 0]
    assert [g.tolist() for g in arrivals.grads(2)] == [[0.0] * 4]
    assert [g.tolist() for g in arrivals.grads(0)] == [[1.0] * 2, [0.0] * 5]


def test_a_backward_pass_completes_first_what_has_its_first_parameter_last():
    a, b, c, d = parameters([1, 1, 1, 1])
    assert leaving_order([[a, d], [b], [c]], [a, b, c, d]) == [2, 1, 0]
