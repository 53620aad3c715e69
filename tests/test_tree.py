"""The facade over torch's pytrees."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fn import tree


class Pair(NamedTuple):
    left: object
    right: object


LEAF = st.floats(allow_nan=False).map(torch.tensor)
TREES = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
def test_unflatten_undoes_flatten(t):
    leaves, structure = tree.flatten(t)
    again, same = tree.flatten(tree.unflatten(structure, leaves))
    assert same == structure
    assert all(a is b for a, b in zip(leaves, again, strict=True))


@given(TREES)
def test_every_leaf_has_a_path_of_its_own(t):
    paths = tree.paths(t)
    assert len(paths) == len(tree.leaves(t)) == len(set(paths))


@given(TREES)
def test_map_keeps_the_structure_and_applies_to_every_leaf(t):
    negated = tree.map(torch.neg, t)
    assert tree.flatten(negated)[1] == tree.flatten(t)[1]
    assert all(torch.equal(-a, b) for a, b in zip(tree.leaves(t), tree.leaves(negated), strict=True))


def test_paths_spell_fields_keys_and_places():
    t = Pair({"w": [torch.ones(1), torch.ones(1)]}, (torch.ones(1),))
    assert tree.paths(t) == ["left.w.0", "left.w.1", "right.0"]


def test_map_refuses_a_second_tree_of_another_structure():
    with pytest.raises(ValueError, match=r"(?i)mismatch|expected"):
        tree.map(torch.add, [torch.ones(1)], [torch.ones(1), torch.ones(1)])


def test_fields_finds_a_name_at_every_depth_outermost_first():
    t = Pair(Pair(1, 2), {"k": [Pair(3, 4)]})
    assert tree.fields(t, "left") == [Pair(1, 2), 1, 3]
    assert tree.fields(t, "middle") == []
