"""Where the residual errors of single tensors lie: an adapter gives back those of tensors that sat out a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.axis import AxisNames, axis_index, axis_size
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.feedback import where_rests
from fn.collectives.hierarchy import Hop, join_errors, levels, split_errors
from fn.transforms import flat_layout as layouts
from fn.transforms.resharding import Notes

Tree = Any


class Residuals(NamedTuple):
    """How an init laid out residual errors of leaves, in the vectors that travel.

    state: which it made. leaves: of the params. arrange: leaves -> the vectors that they make. axis: over which these
    travel; worker, server: the hops of both halves. servers: whether the last hop has any.
    """

    state: ErrorFeedbackState
    leaves: list[Tensor]
    arrange: Callable[[list[Tensor]], list[layouts.Bucket]]
    axis: AxisNames
    worker: list[Hop]
    server: list[Hop]
    servers: bool = True

    def rested(
        self, before: ErrorFeedbackState, after: ErrorFeedbackState, leaves: list[Tensor], rests: Sequence[bool]
    ) -> ErrorFeedbackState:
        """Return the errors behind a step, those of leaves that rest as they were before it.

        Args: before, after: like the state that init made, of other leaves, on the axes that are bound now.
        """
        workers, servers = [], []
        for bucket, *several in zip(self.arrange(leaves), *before, *after, strict=True):
            e_before, d_before, e, d = (split_errors(error, self.axis) for error in several)
            marks = [torch.tensor(rests[i], dtype=torch.bool, device=leaves[i].device) for i in bucket.leaf_indices]
            rest = layouts.spread(marks, bucket).reshape(-1)  # (W, n / W) -> (n,)
            cuts = levels(bucket.segments, self.axis, servers=self.servers)
            for i, (there, back, cut) in enumerate(zip(self.worker, self.server, cuts, strict=True)):
                assert cut is not None  # a bucket has segments
                e[i] = where_rests(rest, e_before[i], e[i], there.for_rows(cut), there.feedback, cut)
                if self.servers or i + 1 < len(cuts):
                    # (n,) -> (W, n / W) -> (n / W,), the row that this rank serves
                    index = int(axis_index(there.axis))
                    rest, row = rest.view(axis_size(there.axis), -1)[index], cut.row(index)
                    d[i] = where_rests(rest, d_before[i], d[i], back.for_own_row(cut), back.feedback, row)
            workers.append(join_errors(e, self.axis))
            servers.append(join_errors(d, self.axis))
        return ErrorFeedbackState(tuple(workers), tuple(servers))


residuals: Notes[Residuals] = Notes()
"""From each init that lays out errors so."""
