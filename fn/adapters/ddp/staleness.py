"""What must not change between a backward pass and its step, where the step is taken behind that pass.

Whoever clips gradients, writes a learning rate or loads a state in between means the step to follow that, but it has
been computed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.optimizer import Optimizer

SAMPLES = 64
"""Elements of each gradient by which changes are noticed: one that every element shares, or every other one."""


class Changes:
    """Tells a step what is different from what its backward pass was run with, and from what that has left.

    Args: optimizer: whose step it is. scaler: what the loss is scaled by, if it is.
    """

    def __init__(self, optimizer: Optimizer, scaler: Any):
        self._optimizer, self._scaler = optimizer, scaler
        self.forget()

    def forget(self) -> None:
        """Start anew, with another backward pass."""
        self.scale: float | None = None
        """What the loss of the pass is scaled by, once its settings are noted."""
        self._settings: list[Any] = []
        self._left: list[Tensor] = []  # some elements of each param group's gradients

    def note_settings(self) -> None:
        """Note hyper-parameters and state at the beginning of a pass."""
        self.scale = None if self._scaler is None else self._scaler.get_scale()
        self._settings = self._read_settings()

    def note_gradients(self) -> None:
        """Note what gradients a pass has left, once nobody but the user changes them any more."""
        self._left = self._sampled()

    def of_settings(self, maker: str) -> ValueError | None:
        """Return what is wrong if hyper-parameters or state are others than those that were noted.

        Args: maker: the function that the user called.
        """
        if self._read_settings() != self._settings:
            text = "param_groups or state: changed between backward and step, but the step was taken behind backward"
            return ValueError(text)
        if self._scaler is None and hasattr(self._optimizer, "found_inf"):
            text = f"scales the loss, but {maker} does not know it; pass {maker}(..., scaler=scaler)"
            return ValueError(f"scaler: {text}")
        return None

    def of_gradients(self, maker: str) -> ValueError | None:
        """Return what is wrong if gradients are others than those that were noted; asked once for a pass.

        Args: maker: the function that the user called.
        """
        left, self._left = self._left, []
        if len(left) != len(self._optimizer.param_groups):  # none, or a group came since, and all is sent in the step
            return None
        by_scaler = self._scaler is not None or hasattr(self._optimizer, "found_inf")
        unscaled = by_scaler and getattr(self._optimizer, "grad_scale", None) is None
        if unscaled and self.scale is None:  # by a number that is not known here
            return None
        factor = 1.0 / self.scale if unscaled and self.scale else 1.0
        now = self._sampled()
        if _near(now, left, factor):
            return None
        changed = next(g for g, pair in enumerate(zip(now, left, strict=True)) if not _near(pair[:1], pair[1:], factor))
        clips = "fn.Optimizer(..., max_norm=...) and keep_local(model) in the place of overlap"
        clips = clips if maker == "overlap" else f"{maker}(..., max_norm=...)"
        return ValueError(
            f"gradients of param group {changed}: expected those that backward left, from which the step is taken, but "
            f"they were changed between backward and step; leave out what changes them, clip_grad_norm_ or a trainer's "
            f"max_grad_norm perhaps, and clip with {clips}; torch.nn.utils.get_total_norm only reads"
        )

    def _read_settings(self) -> list[Any]:
        training = self._optimizer.training
        tensors = [*training.lrs, *tree.leaves(training.states)]
        return [*((id(x), x._version) for x in tensors), *map(id, training.hypers)]

    def _sampled(self) -> list[Tensor]:
        return [_sample(group["params"]) for group in self._optimizer.param_groups]


@torch.no_grad()
def _sample(params: Sequence[Tensor]) -> Tensor:
    """Return evenly spaced elements of each gradient; zeros where there is none, of which no vector is made."""
    grads = [p.new_zeros(1).expand(p.numel()) if p.grad is None else p.grad for p in params if p.numel()]
    flat = [g.reshape(-1)[:: -(-g.numel() // SAMPLES)] for g in grads]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float32, device="cpu")


def _near(now: Sequence[Tensor], before: Sequence[Tensor], factor: float) -> bool:
    """Tell whether samples are `factor` times what they were, but for rounding."""
    ours, theirs = (torch.cat([x.cpu().double() for x in samples]) for samples in (now, before))
    return torch.allclose(ours, theirs * factor, rtol=0.0 if factor == 1.0 else 1e-3, atol=0.0, equal_nan=True)
