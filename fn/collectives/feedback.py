"""Error feedback: what was not delivered is kept and sent later.

A feedback is three pure functions over an explicit error. `classic` keeps the whole difference, `off` none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tree = Any


class Feedback(NamedTuple):
    """How the error of one rank enters the next message.

    init: x (n,) -> error, for vectors like x.
    compensate: (x, error) -> (n,), what is encoded.
    residual: (compensated, decoded, error) -> the next error.
    """

    init: Callable[[Tensor], Tree]
    compensate: Callable[[Tensor, Tree], Tensor]
    residual: Callable[[Tensor, Tensor, Tree], Tree]


def classic() -> Feedback:
    """Keep the whole difference: c = x + e, send C(c), e <- c - C(c).

    The sum of all that was delivered plus the last error is the sum of all that was to be sent. Errors are float64
    for float64 vectors and float32 for all others.

    Paper: Seide et al., 1-bit SGD (Interspeech 2014); Karimireddy et al., Error feedback fixes SignSGD (ICML 2019),
        algorithm 1.
    """

    def init(x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)

    return Feedback(init, lambda x, error: x + error, lambda compensated, decoded, error: compensated - decoded)


def off() -> Feedback:
    """Forget what was not delivered. The error is the empty tree."""
    return Feedback(lambda x: (), lambda x, error: x, lambda compensated, decoded, error: ())
