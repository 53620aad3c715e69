"""The modules that hold tensors: `roots_of`."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor, nn


def roots_of(params: Sequence[Tensor]) -> tuple[list[tuple[nn.Module, int]], int]:
    """Return the modules that hold some of these and are part of no other, each with the place of the first it holds.

    An optimizer is given tensors, which do not know their modules. Hooks that note modules when they are made, or
    called, miss those that were made before `import fn`, copied or loaded, and cost something in every call. All that
    are alive the garbage collector knows, however they came to be, but for what `gc.freeze` has hidden. Memory has no
    order, and so they have none.

    Returns: the modules, and how many of the params are held.
    """
    gc.collect()  # a model that is dead, in a circle that is not collected yet, holds params on some ranks only
    # By type: `isinstance` asks objects of other libraries for their __class__, which may run anything.
    alive = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_parameters" in vars(x)]
    position = {id(p): i for i, p in enumerate(params)}
    parents: dict[int, list[nn.Module]] = {}
    for x in alive:
        for child in vars(x)["_modules"].values():
            parents.setdefault(id(child), []).append(x)
    first, roots, held = dict[int, int](), dict[int, nn.Module](), set[int]()
    for x in alive:
        places = [position[id(p)] for p in vars(x)["_parameters"].values() if id(p) in position]
        held.update(places)
        above, seen = [x] if places else [], set[int]()
        while above:
            module = above.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            first[id(module)] = min(first.get(id(module), len(position)), *places)
            above += parents.get(id(module), [])
            if id(module) not in parents:
                roots[id(module)] = module
    return [(module, first[i]) for i, module in roots.items()], len(held)
