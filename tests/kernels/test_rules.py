"""One rule, many machines: the same functions on tensors, under `vmap`, in a trace and in a compiled loop."""

from __future__ import annotations

import inspect

import pytest
import torch

from fn.kernels import rules

WORDS = ("where", "root", "sign", "power", "quotient", "lerp", "plus")
RULES = {name: f for name, f in vars(rules).items() if inspect.isfunction(f)}
NUMBERS = {"zero": 0.0, "one": 1.0, "infinity": float("inf"), "top": 8.0, "instead": 0.0, "eps": 1e-3}


def arguments(f) -> list[torch.Tensor | float]:
    """Return a tensor for every array of a rule, and numbers for what is one."""
    draw = torch.Generator().manual_seed(0)
    given = []
    for name in inspect.signature(f).parameters:
        values = torch.randn(33, generator=draw)
        values[:3] = 0.0
        positive = name in ("v", "x", "peak", "rest1", "scale", "sent")
        given.append(NUMBERS.get(name, values.abs() if positive else values))
    return given


@pytest.mark.parametrize("name", [name for name in RULES if name not in WORDS])
def test_a_rule_says_the_same_to_all(name):
    rule, given = RULES[name], arguments(RULES[name])
    expected = rule(*given)
    dims = tuple(0 if isinstance(x, torch.Tensor) else None for x in given)
    torch.testing.assert_close(torch.func.vmap(rule, in_dims=dims)(*given), expected, equal_nan=True)
    traced = torch.compile(rule, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(traced(*given), expected, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in RULES if name not in WORDS])
def test_a_rule_is_compiled_as_it_stands(name):
    np, numba = pytest.importorskip("numpy"), pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    from fn.kernels.cpu import loops  # noqa: F401  it tells Numba what the words mean

    rule, given = RULES[name], arguments(RULES[name])
    names = ", ".join(f"x{i}" for i in range(len(given)))
    scope = {"rule": rule}
    exec(f"def call({names}):\n    return rule({names})", scope)
    compiled = numba.njit(error_model="numpy")(scope["call"])
    columns = [x.tolist() if isinstance(x, torch.Tensor) else [x] * 33 for x in given]
    found = [compiled(*map(np.float32, row)) for row in zip(*columns, strict=True)]
    returned = compiled.nopython_signatures[0].return_type
    assert {*getattr(returned, "types", [returned])} == {numba.float32}, "a literal makes float64 of it"
    expected = rule(*given)
    expected = torch.stack(expected, 1) if isinstance(expected, tuple) else expected
    torch.testing.assert_close(torch.tensor(found), expected, equal_nan=True)
