"""`Phase`, `Transform`, `chain` and `apply_updates`: how pure functions compose."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fn
from fn import Phase, Round, tree
from fn.base import Exchange, NewParams, has_phase, missing

ALL_PHASES = list(Phase)


def count_and_add(amount: float) -> fn.Transform:
    """Add an amount to the updates; the state counts the calls."""
    return fn.lift(
        lambda params: torch.zeros(()),
        lambda updates, state, params: (tree.map(lambda u: u + amount, updates), state + 1),
    )


def only(phase: Phase) -> fn.Transform:
    """Have one phase, in which updates are doubled."""

    def double(updates, state, params):
        return tree.map(lambda u: u * 2, updates), state

    return fn.Transform(lambda params: (), *(double if p is phase else missing(p, "one phase only") for p in Phase))


@pytest.mark.parametrize("phase", ALL_PHASES)
def test_lift_gives_the_same_update_in_every_phase(phase):
    tx = count_and_add(1.0)
    updates, state = tx.update(phase)([torch.tensor(2.0)], tx.init([]), [])
    assert updates[0] == 3.0
    assert state == 1.0


@pytest.mark.parametrize("phase", ALL_PHASES)
def test_stateless_sees_updates_and_params_and_keeps_an_empty_state(phase):
    tx = fn.stateless(lambda updates, params: tree.map(torch.sub, updates, params))
    assert tx.init([torch.ones(2)]) == ()
    updates, state = tx.update(phase)([torch.tensor(5.0)], (), [torch.tensor(2.0)])
    assert updates[0] == 3.0
    assert state == ()


def test_chain_applies_links_in_order_and_keeps_their_states_apart():
    tx = fn.chain(count_and_add(1.0), only(Phase.WARMUP), count_and_add(10.0))
    state = tx.init([])
    updates, state = tx.update(Phase.WARMUP)([torch.tensor(3.0)], state, [])
    assert updates[0] == (3.0 + 1.0) * 2 + 10.0
    assert state[0] == 1
    assert state[1] == ()
    assert state[2] == 1


def test_the_empty_chain_is_the_identity():
    tx = fn.chain()
    u = [torch.tensor(3.0)]
    assert tx.update(Phase.LOCAL)(u, tx.init([]), []) == (u, ())


@pytest.mark.parametrize("phase", [Phase.COMPRESSED, Phase.LOCAL])
def test_a_chain_lacks_the_phase_that_a_link_lacks(phase):
    tx = fn.chain(count_and_add(1.0), fn.chain(only(Phase.WARMUP)))
    assert has_phase(tx, Phase.WARMUP)
    assert not has_phase(tx, phase)
    with pytest.raises(ValueError, match=rf"phase.*{phase.name}.*one phase only.*WARMUP"):
        tx.update(phase)


def test_a_missing_update_that_is_called_directly_says_who_lacks_what():
    with pytest.raises(ValueError, match="one phase only has no LOCAL phase"):
        only(Phase.WARMUP).local_update([], (), [])


def test_update_takes_a_phase_by_value_and_refuses_anything_else():
    tx = count_and_add(1.0)
    assert tx.update("warmup") is tx.warmup_update
    with pytest.raises(ValueError, match="frozen"):
        tx.update("frozen")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_apply_updates_keeps_the_dtype_of_the_params_and_rounds_once(dtype):
    p = torch.linspace(-1, 1, 101).to(dtype)
    u = torch.linspace(1e-3, 2e-3, 101)
    (new,) = fn.apply_updates([p], [u])
    assert new.dtype == dtype
    assert torch.equal(
        new, (p.double() + u.double()).to(dtype) if dtype == torch.float64 else (p.float() + u).to(dtype)
    )


@pytest.mark.parametrize(("param", "update"), [((3,), (2, 3)), ((2, 3), (3,)), ((3,), (1,)), ((3,), ())])
def test_apply_updates_refuses_what_would_be_broadcast_by_leaf(param, update):
    params = {"b": torch.ones(2), "w": [torch.ones(param)]}
    updates = {"b": torch.ones(2), "w": [torch.ones(update)]}
    text = f"updates: expected leaf 'w.0' to have the shape of its parameter, {param}, but got {update}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fn.apply_updates(params, updates)


def jump() -> fn.Transform:
    """Add updates, and 1 where an exchange ends."""

    def ended(params: Any) -> Any:
        return tree.map(lambda p: p + 1, params)

    def update(updates, state, params):
        return updates, state

    def whole(updates, state, params):
        return NewParams(ended(fn.apply_updates(params, updates))), state

    exchange = Exchange(*[lambda n, s, p: (p, s)] * 2, lambda n, s, p: (ended(p), s))
    return fn.Transform(lambda params: (), update, whole, update, exchange=exchange)


@pytest.mark.parametrize("when", [Round(), Round(0, 0), Round(2, None), Round(None, 1)])
def test_a_round_is_its_phase_for_what_knows_no_rounds(when):
    tx = fn.chain(only(Phase.COMPRESSED), count_and_add(1.0))
    phase = Phase.LOCAL if when == Round() else Phase.COMPRESSED
    assert when.phase is phase
    if phase is Phase.LOCAL:
        with pytest.raises(ValueError, match="one phase only"):
            tx.update(when)
        return
    assert tx.update(when)([torch.tensor(2.0)], tx.init([]), [])[0] == [torch.tensor(5.0)]


def test_rounds_pass_through_what_combines_and_each_is_made_once():
    tx = fn.skip_nonfinite(fn.chain(count_and_add(1.0), fn.mask(jump(), [True])))
    params = [torch.tensor(4.0)]
    for when, wanted in ((Round(3, None), 4.0 + 3.0), (Round(None, 3), 8.0), (Round(), 7.0), (Phase.COMPRESSED, 8.0)):
        updates, _ = tx.update(when)([torch.tensor(2.0)], tx.init(params), params)
        assert fn.apply_updates(params, updates) == [torch.tensor(wanted)]
        assert tx.update(when) is tx.update(when)
    assert fn.unfrozen(tx).exchange is None


@pytest.mark.parametrize("when", [Round("0"), Round(None, 1.5), Round(True), Round(-1), Round(0, -1)])
def test_a_round_of_no_fragments_is_refused_by_field(when):
    field = "begin" if when.begin is not None and when.end is None else "end"
    with pytest.raises((TypeError, ValueError), match=rf"phase\.{field}: expected the number of a fragment"):
        count_and_add(1.0).update(when)


def test_a_link_behind_new_params_is_refused_by_name_and_a_guard_is_none():
    last = fn.chain(jump(), fn.chain(), fn.skip_nonfinite(fn.chain()))
    params = [torch.ones(2)]
    assert isinstance(last.update(Round(0, 0))(params, last.init(params), params)[0], NewParams)
    for behind in (fn.scale_by_learning_rate(0.1), fn.chain(fn.chain(), fn.scale_by_learning_rate(0.1))):
        with pytest.raises(ValueError, match=r"links: expected what returns new params.* got scale_by_learning_rate"):
            fn.chain(jump(), behind)


def test_new_params_are_copied_and_rounded_and_checked():
    wide = torch.tensor([1.0, 1.001, 2.0])
    (new,) = fn.apply_updates([torch.zeros(3).bfloat16()], NewParams([wide]))
    assert torch.equal(new, wide.bfloat16())
    (same,) = fn.apply_updates([torch.zeros(3)], NewParams([wide]))
    assert torch.equal(same, wide)
    assert same.data_ptr() != wide.data_ptr()
    with pytest.raises(ValueError, match="shape"):
        fn.apply_updates([torch.zeros(2)], NewParams([wide]))


def test_a_guard_replaces_new_params_by_the_old_ones():
    def update(updates, state, params):
        return NewParams(tree.map(torch.add, params, updates)), state

    tx, params = fn.skip_nonfinite(fn.lift(lambda params: (), update)), [torch.ones(2)]
    updates, state = tx.update(Phase.COMPRESSED)([torch.tensor([1.0, float("nan")])], tx.init(params), params)
    assert torch.equal(fn.apply_updates(params, updates)[0], params[0])
    assert state.skipped == 1
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    fn.Optimizer([p], lambda lr: fn.lift(lambda params: (), update)).step()
    assert torch.equal(p, 2 * torch.ones(2))


NEED_PARAMS = {
    "add_decayed_weights": fn.add_decayed_weights(0.1),
    "scale_by_trust_ratio": fn.scale_by_trust_ratio(),
    "mask": fn.mask(fn.scale_by_adam(), {"w": True}),
    "partition": fn.partition({"a": fn.scale_by_adam()}, {"w": "a"}),
    "lamb": fn.lamb(0.1),
    "onebit_adam": fn.onebit_adam(0.1, axis="data", weight_decay=0.1),
    "onebit_lamb": fn.onebit_lamb(0.1, axis="data"),
    "zero_one_adam": fn.zero_one_adam(0.1, axis="data"),
    "sharded": fn.sharded(fn.scale_by_adam(), "data"),
    "loco_adamw": fn.loco_adamw(0.1, axis="data"),
    "sharded_onebit_adam": fn.sharded_onebit_adam(0.1, axis="data"),
    "diloco": fn.diloco(0.1, axis="data"),
    "muloco": fn.muloco(0.1, axis="data"),
    "sparse_loco": fn.sparse_loco(0.1, axis="data"),
}


@pytest.mark.parametrize("name", NEED_PARAMS)
@pytest.mark.parametrize("phase", Phase)
def test_links_that_need_params_say_so(name, phase):
    tx, params = NEED_PARAMS[name], {"w": torch.ones(3)}
    if has_phase(tx, phase):
        state = tx.init(params)
        with pytest.raises(TypeError, match=r"params: expected .*, but got None; .*\(updates, state, params\)"):
            tx.update(phase)({"w": torch.ones(3)}, state, None)


def test_negative_zero_is_the_update_that_moves_nothing():
    for value in (0.0, -0.0, 1.5, float("inf")):
        p = torch.tensor(value)
        (new,) = fn.apply_updates([p], [torch.tensor(-0.0)])
        assert torch.equal(new, p)
        assert torch.signbit(new) == torch.signbit(p)


def test_a_chain_has_its_links_and_a_guard_hands_them_on():
    links = fn.scale_by_adam(), fn.chain(fn.scale(2.0)), fn.scale_by_learning_rate(0.1)
    tx = fn.chain(*links)
    assert tx.links == links
    assert fn.skip_nonfinite(tx).links == links
    assert [link.links for link in links] == [(), links[1].links, ()]
    assert len(fn.adamw(0.1).links) == 4
    assert fn.partition({"all": tx}, {"w": "all"}).links == ()
