"""Rules on lists: tensor by tensor as they stand, or by one call of a kernel for each kind of tensors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fn.kernels import lists, rules

SHAPES = [(3, 2), (), (0,), (1023,)]


def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    kinds = dtypes or (torch.float32,)
    return [torch.randn(shape).to(kinds[i % len(kinds)]) for i, shape in enumerate(SHAPES)]


@pytest.fixture(params=["by tensor", "by kernel"])
def way(request):
    """Take tensors of the CPU for those of a device with kernels, of which the reference is one."""
    if request.param == "by tensor":
        yield request.param
    else:
        with mock.patch.object(lists, "has_kernels", return_value=True):
            yield request.param


def test_a_rule_is_applied_in_each_place(way):
    mu, grads = tensors(), tensors()
    found = lists.elementwise(rules.lerp, (grads, mu), 0.9, like=1)
    assert all(torch.equal(x, torch.lerp(g, m, 0.9)) for x, g, m in zip(found, grads, mu, strict=True))
    direction, after = lists.elementwise(rules.lion, (mu, grads), 0.9, torch.tensor(0.5))
    torch.testing.assert_close(direction, found)
    torch.testing.assert_close(after, [(g + m) / 2 for g, m in zip(grads, mu, strict=True)])


def test_dtypes_are_those_of_a_list(way):
    mixed, wide = tensors(torch.bfloat16, torch.float64, torch.float32), tensors()
    for like, dtypes in ((0, [x.dtype for x in mixed]), (1, [torch.float32] * len(SHAPES))):
        found = lists.elementwise(rules.decayed, (mixed, wide), 0.1, like=like)
        assert [x.dtype for x in found] == dtypes
        expected = [(a.double() + 0.1 * b.double()).to(t) for a, b, t in zip(mixed, wide, dtypes, strict=True)]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_numbers_may_be_one_for_each_tensor(way):
    mixed, factors = tensors(torch.float32, torch.float16), torch.arange(1.0, 5.0)
    found = lists.elementwise(rules.scaled, (mixed,), factors)
    torch.testing.assert_close(found, [x * k for k, x in enumerate(mixed, 1)])


def test_results_may_be_written_over_operands(way):
    mu, grads = tensors(), tensors(torch.bfloat16)
    expected = lists.elementwise(rules.lerp, (grads, mu), 0.9, like=1)
    found = lists.elementwise(rules.lerp, (grads, mu), 0.9, like=1, out=[mu])
    assert all(x is m for x, m in zip(found, mu, strict=True))
    torch.testing.assert_close(mu, expected)


def test_half_precision_is_rounded_once_where_so_wanted(way):
    x, factor = [torch.full((9,), 3.0, dtype=torch.bfloat16)], torch.tensor(1.0039)
    expected = (x[0].float() * factor).to(torch.bfloat16)
    assert torch.equal(lists.elementwise(rules.scaled, (x,), factor, wide=True)[0], expected)


def test_lists_without_tensors_have_results_without(way):
    assert lists.elementwise(rules.lerp, ([], []), 0.5) == []
    assert lists.elementwise(rules.lion, ([], []), 0.5, 0.5) == ([], [])


def test_other_layouts_and_shapes_are_taken_too(way):
    x = [torch.randn(4, 3).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    y = [torch.randn(3, 4), torch.randn(2, 3, 4, 4)]
    for a, b, found in zip(x, y, lists.elementwise(rules.decayed, (x, y), 2.0), strict=True):
        assert torch.equal(found, a + 2.0 * b)
    (found,) = lists.elementwise(rules.decayed, ([torch.ones(3)], [torch.ones(1)]), 2.0)
    assert torch.equal(found, torch.full((3,), 3.0))


def test_gradients_vmap_and_traces_see_the_rule():
    x, y = tensors(), tensors()
    assert not lists.has_kernels([*x, *y])
    batch = torch.func.vmap(lambda a, b: lists.elementwise(rules.decayed, ([a], [b]), 0.1)[0])
    assert torch.equal(batch(x[0], y[0]), x[0] + 0.1 * y[0])

    def lion(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        return lists.elementwise(rules.lion, (a, b), 0.9, 0.5)

    torch.testing.assert_close(torch.compile(lion, fullgraph=True, backend="eager")(x, y), lion(x, y))
    leaf = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(lists.elementwise(rules.scaled, ([leaf],), 2.0)[0].sum(), leaf)
    assert torch.equal(slope, torch.full((3,), 2.0))
