"""What `lion_vote`, and links of methods that send codes, promise beside the recorded runs and the common contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_codes import FOLDER, load
from simulated import one_step
from torch import Tensor

import fn
from fn import Phase


def test_distributed_lions_ties_and_bits_are_others() -> None:
    """
    Differs: fn.vote_optimizers.lion_vote: ties and zeros take turns, and blocks of zeros abstain; in the authors' code
        all are -1, so that with two ranks params drift wherever the ranks disagree. One bit travels for an element;
        theirs are added up as 64 bit numbers.
    """
    case = next(case for case in load(FOLDER, "index_lion.json") if case.row["name"] == "lion_w2_ties")
    g, lr = case.each("grad")[0][0], case.hyper["lr"]
    divided = g[0].sign() != g[1].sign()
    theirs = case.each("param")[0][0] - case.each("init")[0] * (1 - lr * case.hyper["weight_decay"])
    torch.testing.assert_close(theirs[divided], torch.full_like(theirs[divided], lr), rtol=1e-3, atol=0)
    with fn.ledger() as sent:
        ours = one_step(fn.lion_vote(lr, axis="data"), g)
    index = torch.arange(g[0].numel()).view(g[0].shape)
    torch.testing.assert_close(ours[divided], torch.where(index % 2 == 0, -lr, lr)[divided])
    # 35 elements in two pieces of 24, there and back; for each row a byte of flags of blocks, and one of the row
    assert sent.total == 2 * 24 // 8 + 2 + 2
    assert case.arrays["bytes"][0] > 8 * sent.total


def test_a_side_is_cut_by_the_tile_and_not_by_its_divisors() -> None:
    """
    Differs: fn.transforms.bases.dct: a tile is as long as it is said to be, and the last one shorter; theirs are as
        long as the largest divisor of a side, which of a prime is 1.
    """
    assert [part.shape for part in fn.dct(64).into(torch.zeros(67))] == [(1, 64), (1, 3)]
    shapes = [part.shape for part in fn.dct(4).into(torch.zeros(6, 3, 9))]
    assert shapes == [(2, 48), (1, 12), (2, 24), (1, 6)]
    x = torch.randn(6, 3, 9)
    torch.testing.assert_close(fn.dct(4).back(fn.dct(4).into(x), x.shape), x)
    torch.testing.assert_close(fn.dct(8).into(torch.ones(8))[0][0], torch.tensor([8**0.5, *[0.0] * 7]))


@pytest.mark.parametrize("gather_feedback", [None, fn.classic(), fn.off()], ids=repr)
@pytest.mark.parametrize("servers", [False, True])
def test_after_a_warm_up_step_differences_have_nothing_to_catch_up(servers: bool, gather_feedback: Any) -> None:
    """And what arrived is the mean of the ranks' h, but for what the servers keep."""
    extra = {"gather_feedback": gather_feedback} if servers else {}
    mean = fn.compressed_average("data", fn.int4(8), fn.differences(), servers=servers, **extra)
    tx, p = fn.chain(mean, fn.running_sum()), torch.zeros(40)
    x = torch.randn(3, 40)

    def on_rank(x: Tensor) -> tuple[Tensor, ...]:
        s, out = tx.init(p), []
        for t, g in enumerate((2 * x, x, x, x + 1)):
            u, s = tx.update(Phase.WARMUP if t == 1 else Phase.COMPRESSED)(g, s, p)
            out.append(u)
        h = fn.pmean(s[0].worker[0], "data")[:40]
        kept = fn.all_gather(s[0].server[0], "data").flatten()[:40] if s[0].server[0] != () else torch.zeros(40)
        return torch.stack(out), h, kept

    found, h, kept = fn.simulate(on_rank, "data", 3, in_dims=0, out_dims=None)(x)
    torch.testing.assert_close(found[1], x.mean(0))
    torch.testing.assert_close(found[2], x.mean(0))
    torch.testing.assert_close(found[3], (x + 1).mean(0), rtol=0, atol=0.3)
    if gather_feedback is None or gather_feedback.rule == fn.classic().rule or not servers:
        torch.testing.assert_close(found[3] + kept, h)


def test_the_halves_of_an_average_may_have_feedbacks_of_their_own() -> None:
    """With the same one in both it is the average without the word for it."""
    x = torch.randn(6, 4, 50)

    def last(**extra: Any) -> Tensor:
        tx = fn.compressed_average("data", fn.int4(8), fn.classic(), **extra)

        def on_rank(x: Tensor) -> Tensor:
            s = tx.init(x[0])
            for g in x:
                u, s = tx.compressed_update(g, s, g)
            return u

        return fn.simulate(on_rank, "data", 4, in_dims=1, out_dims=None)(x)

    assert torch.equal(last(gather_feedback=fn.classic()), last())
    assert not torch.equal(last(gather_feedback=fn.off()), last())


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.dct(lambda side: 0).into(torch.zeros(3)), ValueError, "tile: expected a whole number of at least"),
        (lambda: fn.lion_vote(axis="data", ties="zero"), ValueError, "ties: expected 'alternate', 'even' or 'plus'"),
        (lambda: fn.lion_vote(axis="data", b1=1.0), ValueError, "b1: expected"),
        (lambda: fn.scale(float("nan")), ValueError, "x: expected a finite number"),
        (lambda: fn.scale(torch.ones(2)), ValueError, "x: expected a float or a 0-d tensor"),
        (lambda: fn.scale_by_sign(1.0), ValueError, r"noise: expected a number in \[0, 1\)"),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback=fn.off(), servers=False),
            ValueError,
            "gather_feedback: is given with servers=False",
        ),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback=fn.differences()),
            ValueError,
            "gather_feedback: expected one for what is sent once",
        ),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback="off"),
            TypeError,
            "gather_feedback: expected a Feedback",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
