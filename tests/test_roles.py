"""What fields of states are is declared by their classes: a field may have any name, and is found by its role."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import roles
from fn.collectives.axis import ALONE, Axis, Binding

WORDS = (
    "ages", "alone", "anchor", "copies", "coefficient", "dropped", "elapsed", "errors", "factor", "gradient_errors",
    "inner", "left_out", "local_params", "master", "mu", "nu", "nu_fresh", "others", "outer", "peak",
    "pending", "place", "q", "rank_local", "ratio", "roles", "scaling", "second_moment", "server", "shard", "skipped",
    "skips", "step", "steps", "sync", "total", "watched", "worker",
)  # fmt: skip
"""Names that fields of this library's own states have, and those of declarations and roles."""


def holding(names: Sequence[str], start: torch.Tensor, grows: float) -> fn.Transform:
    """Return a link that changes no update, and whose state has fields of these names, which grow in each step."""
    kind: Any = NamedTuple("Own", [(name, torch.Tensor) for name in names])  # type: ignore[misc]

    def update(updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        return updates, kind(*(x + grows for x in state)) if grows else state

    return fn.lift(lambda params: kind(*(start.clone() for _ in names)), update)


def plain(names: Sequence[str]) -> list[fn.Transform]:
    """Return links whose fields count, hold an infinite number, and are negative."""
    count, infinite, below = torch.tensor(1), torch.tensor([torch.inf]), torch.tensor(-1.0)
    return [holding(names, count, 1), holding(names, infinite, 0), holding(names, below, 0)]


def onebit(names: Sequence[str], lr: Any) -> fn.Transform:
    sync = fn.compressed_average("data", fn.sign())
    links = fn.average("data", fn.int8()), *plain(names), fn.scale_by_onebit_adam(sync=sync)
    return fn.chain(*links, fn.scale_by_learning_rate(lr))


def local_steps(names: Sequence[str], lr: Any) -> fn.Transform:
    count, _, below = plain(names)  # a local step whose state is not finite is left out
    inner = fn.chain(count, below, fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    outer = fn.chain(count, below, fn.trace(0.9), fn.scale_by_learning_rate(0.7))
    mean = fn.compressed_average("data", fn.identity(), fn.off())
    return fn.chain(fn.average("data"), *plain(names), fn.outer(inner, outer, fn.chain(mean, count, below)))


METHODS: dict[str, tuple[Callable[..., fn.Transform], Callable[[], Any]]] = {
    "1-bit Adam, frozen when stable": (onebit, lambda: fn.freeze_when_stable(b2=0.5, threshold=0.1)),
    "local steps": (local_steps, lambda: fn.every(2)),
}


def trained(method: str, names: Sequence[str]) -> tuple[list[float], int, int]:
    """Return the parameters, and the steps that were taken and skipped: some before, some behind a saved state."""
    make, schedule = METHODS[method]
    params = [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), torch.nn.Parameter(torch.ones(2))]

    def made() -> fn.Optimizer:
        return fn.Optimizer(params, lambda lr: make(names, lr), schedule=schedule(), lr=0.1, max_norm=100.0)

    with Binding(ONE):
        opt = made()
        for step in range(8):
            for p in params[: 2 if step != 3 else 1]:  # in one step one of them has no gradient
                p.grad = 0.5 * p.detach() + step
            opt.step()
            opt.zero_grad()
            if step == 4:
                saved = opt.state_dict()
                opt = made()
                opt.load_state_dict(saved)
    return [x for p in params for x in p.tolist()], opt.steps, opt.skipped


ONE = {"data": Axis(1, torch.tensor(0), ALONE)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_state_whose_fields_have_any_names_trains(method):
    wanted = trained(method, [f"own_{name}" for name in WORDS])
    assert wanted[1:] == (8, 0)
    assert wanted[0][0] != 1.0
    assert trained(method, WORDS) == wanted


class OwnState(NamedTuple):
    """A state that declares its fields."""

    tokens: torch.Tensor
    squares: torch.Tensor
    inside: Any

    @property
    def roles(self) -> fn.Roles:
        return fn.Roles(second_moment=("squares",), skips=("tokens",))


def test_fields_are_found_by_their_roles_outermost_first():
    inside = OwnState(torch.tensor(3), torch.tensor([4.0]), ())
    state = {"a": [OwnState(torch.tensor(1), torch.tensor([2.0]), inside)], "b": torch.ones(2)}
    assert [int(x) for x in roles.find(state, "skips")] == [1, 3]
    assert [float(x) for x in roles.find(state, "second_moment")] == [2.0, 4.0]
    assert roles.find(state, "copies") == []
    with pytest.raises(AttributeError, match="no attribute 'nu'"):
        roles.find(state, "nu")


def test_a_second_moment_of_a_users_own_is_watched_by_a_schedule():
    def init(params):
        return OwnState(torch.tensor(0), [torch.zeros_like(p) for p in params], ())

    def update(updates, state, params, /):
        squares = [0.5 * s + 0.5 * u * u for s, u in zip(state.squares, updates, strict=True)]
        return [-0.1 * u for u in updates], state._replace(squares=squares)

    schedule = fn.freeze_when_stable(b2=0.5)
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], lambda lr: fn.lift(init, update), schedule=schedule)
    p.grad = torch.full((3,), 2.0)
    opt.step()
    assert schedule.norms == [6.0]


class Undelivered(NamedTuple):
    """What a rank has of its own and a warm-up does not read."""

    lost: torch.Tensor

    @property
    def rank_local(self) -> set[str]:
        return {"lost"}

    @property
    def roles(self) -> fn.Roles:
        return fn.Roles(errors=("lost",))


class Momentum(NamedTuple):
    """What a rank has of its own, whatever that is."""

    lost: torch.Tensor

    @property
    def rank_local(self) -> set[str]:
        return {"lost"}


def sent_in_a_clipped_warm_up() -> list[tuple[int, list[str]]]:
    """Return the bytes of a step with `max_norm`, and what was warned of before it, without a schedule."""
    found = []
    for kind in (Undelivered, Momentum):
        link = fn.lift(lambda params, kind=kind: kind(torch.zeros(4)), lambda u, state, params: (u, state))
        p = torch.nn.Parameter(torch.ones(4))
        with warnings.catch_warnings(record=True) as caught, fn.bind({"data": dist.group.WORLD}):
            warnings.simplefilter("always")
            links = fn.average("data"), link, fn.scale_by_adam()
            opt = fn.Optimizer([p], lambda lr, links=links: fn.chain(*links), max_norm=1.0)
        p.grad = torch.ones(4) + dist.get_rank()
        with fn.ledger() as wire:
            opt.step()
        found.append((wire.total, [str(w.message).partition(";")[0] for w in caught]))
    return found


def test_a_users_own_errors_are_no_part_of_a_warm_up_step():
    told = "schedule: is None, so every step is a warm-up step"
    # 24 bytes once, which ask whether gradients are averaged already
    assert ranks.run(2, sent_in_a_clipped_warm_up) == [[(40, [told]), (56, [])]] * 2


class WrongKind(NamedTuple):
    """A state whose roles are no `fn.Roles`."""

    x: torch.Tensor

    @property
    def roles(self) -> Any:
        return {"second_moment": ("x",)}


class WrongField(WrongKind):
    """One that names what is no field."""

    @property
    def roles(self) -> Any:
        return fn.Roles(copies=("anchor",))


class PlainString(WrongKind):
    """One that names fields in a string."""

    @property
    def roles(self) -> Any:
        return fn.Roles(skips="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (WrongKind, TypeError, "WrongKind.roles: expected an fn.Roles, but got dict"),
        (WrongField, ValueError, r"WrongField.roles.copies to name fields of WrongField \(x\), but got 'anchor'"),
        (PlainString, TypeError, "PlainString.roles.skips to be a set or tuple of names, but got the string 'x'"),
    ],
)
def test_a_state_whose_class_declares_what_it_does_not_have_is_refused(kind, error, text):
    link = fn.lift(lambda params: kind(torch.zeros(2)), lambda updates, state, params: (updates, state))
    with pytest.raises(error, match=text):
        fn.chain(link, fn.scale_by_adam()).init([torch.ones(2)])


def test_the_library_looks_for_no_field_by_its_name():
    calls = {path.name for path in Path(fn.__file__).parent.rglob("*.py") if "tree.fields(" in path.read_text()}
    assert calls == set()


def test_a_declaration_leaves_alone_what_it_does_not_name():
    class Written(NamedTuple):
        mu: torch.Tensor
        local_params: torch.Tensor  # a field, and no declaration

        @property
        def rank_local(self) -> frozenset[str]:
            return frozenset({"mu"})

    state: Any = roles.declare(first_moment=("mu",))(Written)(torch.zeros(1), torch.ones(1))
    assert state.local_params is state[1]
    assert roles.agreed_of(state) is None
    assert not roles.has_local_params(state)
    assert roles.rank_local(state) == {"mu"}
    assert roles.roles_of(state).first_moment == ("mu",)

    class Plain(NamedTuple):
        mu: torch.Tensor
        rank_local = ("mu",)

    @roles.declare(local_params=lambda state, params: [state.mu])
    class Inheriting(Plain):
        pass

    heir: Any = Inheriting(torch.zeros(1))
    agreed = roles.agreed_of(heir)
    assert roles.has_local_params(heir)
    assert agreed is not None
    assert agreed(heir, []) == [heir.mu]
    assert roles.rank_local(heir) == {"mu"}


def test_a_declaration_that_would_hide_a_field_or_is_a_string_is_refused():
    class Counted(NamedTuple):
        mu: torch.Tensor
        local_params: torch.Tensor

    with pytest.raises(ValueError, match=r"^Counted: expected to have no field 'local_params'"):
        roles.declare(local_params=lambda state, params: params)(Counted)
    state: Any = roles.declare(rank_local="mu")(Counted)(torch.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match=r"^expected Counted.rank_local to be a set or tuple .* the string 'mu'"):
        roles.check(state)
