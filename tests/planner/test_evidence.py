"""Numbers of steps: the published tables' at their sizes, lines between them, and ranges that hold what others say."""

from __future__ import annotations

import math

import pytest

from fn.planner.evidence import AT_SIZE, NONE, OTHER_SIZE, SMALL, evidence, given, measured, published

CELLS = {130e6: (0.70, 0.75, 0.76, 0.72), 520e6: (0.75, 0.82), 1.2e9: (0.85, 0.91)}
OTHERS = {124e6: (0.58, 0.67), 1.5e9: (0.5, 0.5), 4e9: (0.85, 0.90)}
"""Exact Muon's steps over AdamW's, as its authors' raw results say; those of others."""

MULOCO = {
    150e6: (3.158, 3.120, 3.222), 416e6: (2.682, 2.638, 2.713), 914e6: (2.440, 2.400, 2.448),
    1.76e9: (2.266, 2.238, 2.291), 3.1e9: (2.145, 2.122, 2.165), 15e9: (1.887, 1.884, 1.917),
}  # fmt: skip
"""Final losses: data-parallel AdamW, MuLoCo on 1 and on 16 replicas."""

DILOCO = {
    (35e6, 2): 0.023, (35e6, 8): 0.136, (90e6, 4): 0.046, (335e6, 1): -0.007, (1.3e9, 8): 0.033, (2.4e9, 2): -0.003,
    (150e6, 16): 0.168, (15e9, 16): 0.019,
}  # fmt: skip


@pytest.mark.parametrize("name", ["muon", "sign_muon"])
@pytest.mark.parametrize("params", CELLS)
def test_steps_are_those_of_the_raw_cells_and_the_range_holds_every_source(name, params):
    known = evidence(name, int(params))
    ratio, low, high = known.steps
    assert all(abs(ratio - cell) < 0.07 for cell in CELLS[params])
    assert low <= min(CELLS[params]) <= max(CELLS[params]) <= high
    assert known.grade == (AT_SIZE if name == "muon" else SMALL)
    assert "arXiv 2509.02046" in known.words
    assert "on our model" not in known.words


@pytest.mark.parametrize("params", OTHERS)
def test_the_range_holds_what_others_say(params):
    _, low, high = evidence("muon", int(params)).steps
    assert low <= min(OTHERS[params]) <= max(OTHERS[params]) <= high


def test_between_sizes_steps_are_linear_in_the_logarithm_and_beyond_them_those_of_the_last():
    at = {n: evidence("muon", n).steps[0] for n in (130_000_000, 260_000_000, 520_000_000, 1_200_000_000, 10**11)}
    assert at[260_000_000] == pytest.approx((at[130_000_000] + at[520_000_000]) / 2)
    assert at[10**11] == at[1_200_000_000]
    assert evidence("muon", 10**11).grade == evidence("muon", 260_000_000).grade == OTHER_SIZE


@pytest.mark.parametrize(("params", "shown"), [(10**5, True), (10**6, True), (10**6 + 1, False), (10**8, False)])
def test_our_own_number_stands_beside_the_published_one_for_tiny_models_only(params, shown):
    known = evidence("sign_muon", params)
    assert ("72 % (61 to 86 %) on our model of 131,072 parameters, in a run of 3200 steps" in known.words) == shown
    assert (known.own is not None) == shown
    assert "votes: no published run above 1M parameters; not told apart from exact Muon there" in known.words
    ratio, low, high = known.steps
    assert low <= measured()["methods"]["sign_muon"]["interval"][0] < ratio < high
    assert ratio == evidence("muon", 130_000_000).steps[0]


def test_gaps_are_those_of_the_tables():
    for params, (adamw, one, many) in MULOCO.items():
        for replicas, loss in ((1, one), (16, many)):
            known = evidence("muloco, int8", int(params), replicas=replicas, local_steps=30)
            assert known.gap == pytest.approx((loss - adamw, loss / adamw - 1))
            assert known.grade == AT_SIZE
            assert (known.steps[0] > 1) == (loss > adamw)
            assert f"{loss - adamw:+.3f} nats" in known.words
        assert known.gap[0] > 0  # with 16 replicas it ends above AdamW at all sizes
    for (params, replicas), gap in DILOCO.items():
        known = evidence("diloco, int8", int(params), replicas=replicas, local_steps=30)
        assert known.gap[0] == pytest.approx(gap)


def test_between_numbers_of_replicas_gaps_are_linear_in_the_logarithm():
    one, four, many = (evidence("muloco, int8", 914_000_000, replicas=k, local_steps=30).gap for k in (1, 4, 16))
    assert four == pytest.approx([(a + b) / 2 for a, b in zip(one, many, strict=True)])


SLOPES = ((3.529 - 3.261) / math.log(8), (3.529 - 3.408) / math.log(2), (3.322 - 3.261) / math.log(2))
"""Of AdamW's loss at 130M: the mean one, the steepest and the flattest."""


@pytest.mark.parametrize(
    ("params", "gap", "flattest"),
    [(150_000_000, 0.064, SLOPES[2]), (1_760_000_000, 0.025, (2.904 - 2.752) / math.log(8))],
)
def test_steps_of_a_gap_are_by_adamws_slope_at_130m_with_a_range_that_holds_the_slopes_next_to_the_size(
    params, gap, flattest
):
    known = evidence("muloco, int8", params, replicas=16, local_steps=30)
    assert known.steps == pytest.approx([math.exp(gap / slope) for slope in (*SLOPES[:2], flattest)])
    assert "slope of AdamW's loss at 130M" in known.words


@pytest.mark.parametrize(("params", "shown"), [(131_072, True), (10**6 + 1, False), (30_000_000, False)])
def test_below_the_published_sizes_the_range_of_muloco_goes_down_to_ours(params, shown):
    known = evidence("muloco, int8", params, replicas=8, local_steps=30)
    published_, low, high = known.steps
    assert published_ == evidence("muloco, int8", 150_000_000, replicas=8, local_steps=30).steps[0]
    assert low == 0.976 < published_ < high
    assert ("106 % (98 to 114 %) on our model of 131,072 parameters" in known.words) == shown
    assert evidence("muloco, int8", 150_000_000, replicas=8, local_steps=30).steps[1] > 1


@pytest.mark.parametrize(("replicas", "local_steps"), [(17, 30), (8, 31)])
def test_more_replicas_and_longer_rounds_than_published_have_no_published_steps(replicas, local_steps):
    known = evidence("muloco, int8", 10**9, replicas=replicas, local_steps=local_steps)
    assert (known.grade, known.steps) == (SMALL, None)
    assert "published with at most 30 local steps and 16 replicas" in known.words


def test_without_a_published_run_there_is_our_own_or_nothing():
    known = evidence("onebit_adam, 1 bit", 10**9)
    assert (known.grade, known.steps, known.own) == (SMALL, None, (1.06, 0.994, 1.14))
    assert "106 % (99 to 114 %) on our model" in known.words
    assert evidence("adamw, int4 gradients", 10**9).own == (1.06, 1.03, 1.10)
    for name in ("dion, rank 1/4", "onebit_adam"):  # a number of one scale a tensor says nothing of blocks
        assert evidence(name, 10**9).grade == NONE
    assert given(0.8).steps == (0.8, 0.8, 0.8)


def test_every_table_has_its_source_licence_tuning_and_tokens():
    tables = [*published()["steps"].values(), *published()["losses"]]
    assert all(table["source"] and table["licence"] and table["url"] and table["tuned"] for table in tables)
    assert all("tokens_a_parameter" in table for table in published()["losses"])
    assert all(size["chinchilla"] for size in published()["steps"]["muon"]["sizes"])
