"""All pairs: few cases in which every two values of different parameters meet.

A fault that needs two settings together, such as a dtype and a layout, is found by some case; of all combinations, most
only repeat it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases, a value of each parameter, so that every pair of values occurs; the same ones in every call.

    Each case begins with the first pair that is missing. The rest is chosen to bring along as many others as it can;
    where that is a tie, the value that was used least.
    """
    values = [list(parameter) for parameter in parameters]
    sizes = list(map(len, values))
    missing = {
        ((a, i), (b, j)): None  # a dict keeps its order
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    used = [[0] * size for size in sizes]
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for a in range(len(sizes)):
            if a not in case:
                gains = [
                    (sum(tuple(sorted([(a, i), other])) in missing for other in case.items()), -used[a][i], -i)
                    for i in range(sizes[a])
                ]
                case[a] = -max(gains)[2]
        for a, i in case.items():
            used[a][i] += 1
        for pair in itertools.combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
        cases.append(tuple(values[a][case[a]] for a in range(len(sizes))))
    return cases
