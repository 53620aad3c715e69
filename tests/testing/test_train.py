"""`fn.testing.train`: ranks that average reach the best params, and ranks that do not are seen apart from them."""

from __future__ import annotations

import pytest

import fn
from fn.testing import train

TO_ITS_TARGET = fn.scale_by_learning_rate(1.0)


def test_a_whole_step_along_the_mean_gradient_ends_at_the_best_params():
    assert train(fn.chain(fn.average("data"), TO_ITS_TARGET)) == (0.944, 0.0)


def test_ranks_that_do_not_average_end_at_their_own_targets():
    before, after = train(TO_ITS_TARGET)
    assert 0 < after < before


def test_the_schedule_is_followed_for_30_steps():
    asked = []
    train(fn.local_sgd(0.1, axis="data"), lambda step: asked.append(step) or fn.every(5)(step))
    assert asked == [*range(30)]


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match=r"^schedule: expected a phase for step 0"):
        train(TO_ITS_TARGET, lambda step: "no phase")
