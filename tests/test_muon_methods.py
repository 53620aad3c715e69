"""What `sign_muon` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import normal, one_step

import fn


def test_ties_take_turns_where_there_are_servers() -> None:
    """Of two ranks that disagree everywhere nothing is left without servers.

    Differs: fn.muon_optimizers.sign_muon: with servers, ties and zeros take turns, and only blocks of zeros abstain;
        there all are 0.
    """
    x = normal(6, 5)
    g = torch.stack([x, -x])
    assert not one_step(fn.sign_muon(0.1, axis="data", servers=False), g).any()
    g[:, :, 0] = x[:, 0]  # else each piece is tied throughout, and abstains
    assert one_step(fn.sign_muon(0.1, axis="data", votes="directions"), g).abs().eq(0.1).all()


def test_votes_on_directions_are_signs_of_orthogonal_momenta() -> None:
    g = normal(3, 6, 5)
    each = [fn.orthogonalize(eps=1e-7, coefficients="jordan").local_update(0.1 * x, (), x)[0].sign() for x in g]
    found = one_step(fn.sign_muon(0.1, axis="data", votes="directions"), g)
    torch.testing.assert_close(found, -0.1 * sum(each).sign())


def test_other_tensors_are_adamws_behind_means_in_codes() -> None:
    """Where scale="rms_norm" a number of a matrix moves by 0.2 of the rate."""
    first = one_step(fn.sign_muon(0.1, axis="data", other_rate=0.5), normal(3, 7))
    torch.testing.assert_close(first.abs(), torch.full((7,), 0.05))
    long = one_step(fn.sign_muon(0.1, axis="data"), normal(3, 40, 40))
    assert long.square().mean().sqrt() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("votes", ["momenta", "directions"])
@pytest.mark.parametrize("servers", [True, False])
def test_an_expert_that_never_gets_a_token_stays(votes: Any, servers: bool) -> None:
    """Although its numbers lie among those of others, in a block and in a server's piece; one rank's token moves it."""
    tx = fn.sign_muon(0.1, axis="data", labels="hidden", votes=votes, servers=servers)
    params, g = torch.ones(4, 3, 5), normal(3, 4, 3, 5)
    g[:, 2], g[1:, 1] = 0, 0
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", 3, in_dims=None, out_dims=dims)(params)
    for phase in (fn.Phase.COMPRESSED, fn.Phase.WARMUP, fn.Phase.COMPRESSED):
        step = fn.simulate(tx.update(phase), "data", 3, in_dims=(0, dims, None), out_dims=(None, dims))
        updates, state = step(g, state, params)
        assert not updates[2].any()
        assert all(updates[i].any() for i in (0, 1, 3))


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: fn.sign_muon(axis="data", votes="all"), ValueError, "votes: expected .momenta. or .directions."),
        (lambda: fn.sign_muon(axis="data", momentum=1.0), ValueError, "momentum: expected"),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()
