"""Small trees of params, and an optimizer that steps on simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fn
from fn import Phase, tree

Tree = Any
SHAPES = {"matrix": (6, 5), "vector": (7,), "wide": (4, 9), "kernel": (2, 3, 3), "scalar": (), "empty": (0, 3)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_params(dtype: torch.dtype = torch.float32) -> Tree:
    return {name: normal(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def gradients_of(params: Tree, world: int, step: int) -> Tree:
    names = [*params]
    return {k: normal(world, *params[k].shape, seed=50 * step + names.index(k)).to(params[k].dtype) for k in names}


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def bits(t: Tree) -> list[Tensor]:
    """Return copies of the leaves, as bytes."""
    return [x.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in tree.leaves(t)]


def same_bits(a: Tree, b: Tree) -> bool:
    return len(tree.leaves(a)) == len(tree.leaves(b)) and all(map(torch.equal, bits(a), bits(b)))


def form(t: Tree) -> list[Any]:
    return [(x.dtype, x.shape) for x in tree.leaves(t)]


class World:
    """An optimizer on simulated ranks, whose params `simulate` shows to be the same on all."""

    def __init__(self, tx: fn.Transform, params: Tree, world: int = 2):
        self.tx, self.world, self.params, self.taken = tx, world, params, 0
        self.dims = fn.rank_dims(tx.init(params))
        self.state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=self.dims)(params)

    def gradients(self) -> Tree:
        self.taken += 1
        leaves, structure = tree.flatten(self.params)
        made = [normal(self.world, *p.shape, seed=100 * self.taken + i).to(p.dtype) for i, p in enumerate(leaves)]
        return tree.unflatten(structure, made)

    def step(self, phase: Phase, g: Tree = None) -> World:
        def on_rank(g: Tree, s: Tree, p: Tree) -> tuple[Tree, Tree]:
            u, s = self.tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        run = fn.simulate(on_rank, "data", self.world, in_dims=(0, self.dims, None), out_dims=(None, self.dims))
        self.params, self.state = run(self.gradients() if g is None else g, self.state, self.params)
        return self


def one_step(tx: fn.Transform, g: Tensor, phase: Phase = Phase.COMPRESSED) -> Tensor:
    """Return the update of the first step from zero params. g: a gradient for each rank."""
    p = torch.zeros(g.shape[1:])
    return fn.simulate(lambda g: tx.update(phase)(g, tx.init(p), p)[0], "data", len(g), out_dims=None)(g)
