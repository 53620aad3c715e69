"""The model that is assumed where only a number of parameters is known: a GPT, as large as those that are published."""

from __future__ import annotations

import math
from typing import NamedTuple

from fn.planner.evidence import between

COMMON = (
    (768, 12), (1024, 24), (1280, 36), (2048, 24), (1600, 48), (2560, 32), (4096, 32), (5120, 40), (12288, 96),
)  # fmt: skip
"""Width and layers, the smallest first: GPT-2's, with 124, 355, 774 and 1,558 million parameters (Radford et al., 2019,
table 2), and GPT-3's, with 1.3, 2.7, 6.7, 13 and 175 billion (arXiv 2005.14165, table 2.1). For 13 billion that table
has a width of 5,140, but 40 heads of 128."""

ROWS = 50_257 + 1024
"""Rows of the embeddings: GPT-2's vocabulary, which the head shares, and its positions."""

STEP = 64
"""Widths are multiples of it, where they are no smaller."""


class Gpt(NamedTuple):
    """wide: of its layers. hidden: parameters in their matrices. other: in embeddings, a tied head, and vectors."""

    wide: int
    hidden: int
    other: int

    @property
    def layers(self) -> int:
        """Return about how many layers that is."""
        return max(self.hidden > 0, round(self.hidden / (12 * self.wide**2)))

    @property
    def share(self) -> float:
        """Return the part of the parameters in hidden matrices."""
        return self.hidden / (self.hidden + self.other)

    def __str__(self) -> str:
        """Say what is assumed."""
        return f"a GPT of width {self.wide:,} with {self.layers:,} layer{'s' * (self.layers != 1)}"


def gpt(params: int, share: float | None = None) -> Gpt:
    """Return the GPT of so many parameters, not one more or less.

    Its width lies on lines between those of `COMMON`, logarithm over logarithm, beyond them it goes with the cube root,
    and is rounded. Then the embeddings are known, and layers take the rest, of which the last one need not be whole. A
    GPT below the smallest has as large a part of its parameters in embeddings: its vocabulary is smaller, too.

    >>> print(gpt(1_300_000_000), round(gpt(1_300_000_000).share, 3))
    a GPT of width 2,048 with 24 layers 0.919
    >>> gpt(124_000_000), gpt(10)
    (Gpt(wide=768, hidden=84717081, other=39282919), Gpt(wide=3, hidden=7, other=3))

    Args: share: the part of the parameters in hidden matrices, if it is known.
    """
    sizes = [12 * layers * wide**2 + ROWS * wide for wide, layers in COMMON]
    wide = math.exp(between(math.log(params), [*map(math.log, sizes)], [math.log(wide) for wide, _ in COMMON]))
    wide *= (params / min(max(params, sizes[0]), sizes[-1])) ** (1 / 3)
    rounded = STEP * round(wide / STEP) or round(wide)
    other = min(ROWS * rounded, params * ROWS * COMMON[0][0] // sizes[0])
    if share is not None:
        other = params - round(share * params)
    hidden = params - other
    return Gpt(max(1, min(rounded, math.isqrt(hidden // 12) or rounded)), hidden, other)
