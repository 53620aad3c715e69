"""What differs between ranks is named: the lowest rank first, by a digest alone where all is the same."""

from __future__ import annotations

import pytest
import ranks
import torch.distributed as dist

import fn
from fn.collectives.agreement import SHORT, differences, gather_values


def compared(of_ranks: list[dict], rank: int = 0) -> tuple[list[str], int]:
    """Return what differs as a rank sees it, and how many messages it took."""
    sent = []

    def gather(mine):
        sent.append(mine)
        if mine is of_ranks[rank]:
            return of_ranks
        return [digest_of(values) for values in of_ranks]

    def digest_of(values: dict) -> str:
        seen: list[str] = []
        differences(values, lambda x: [seen.append(x) if isinstance(x, str) else x])
        return seen[0]

    return [str(difference) for difference in differences(of_ranks[rank], gather)], len(sent)


def test_the_first_rank_comes_first_then_the_order_of_the_names_and_a_missing_name_is_said():
    of_ranks = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 9, "b": 2, "c": 5}]
    of_rank_1 = ["b is 3 on rank 1 and 2 on rank 0"]
    of_rank_2 = ["a is 9 on rank 2 and 1 on rank 0", "c is 5 on rank 2 and missing on rank 0"]
    for rank in range(3):
        assert compared(of_ranks, rank) == (of_rank_1 + of_rank_2, 2)


@pytest.mark.parametrize("others", [{"a": 1, "b": 2}, {"b": 2, "a": 1}])
def test_where_all_is_the_same_in_whatever_order_a_digest_travels_and_nothing_else(others):
    assert compared([{"a": 1, "b": 2}, others]) == ([], 1)


TEXTS = ["", "x" * (SHORT - 2), "ä" * SHORT]


def gathered() -> tuple[list, list]:
    with fn.bind({"data": dist.group.WORLD}):
        short = gather_values([dist.get_rank(), None], "data")
        return short, gather_values(TEXTS[dist.get_rank()], "data")


def test_values_of_any_length_arrive_as_they_were():
    for short, texts in ranks.run(3, gathered):
        assert short == [[0, None], [1, None], [2, None]]
        assert texts == TEXTS
