"""The row of CPUs in Numba; `numba` is its public module. Only `blocks` is imported where Numba is not installed."""

from __future__ import annotations

from fn.kernels.table import Accelerator


def row(device_type: str) -> Accelerator:
    """Return the row. Raises: ImportError where Numba is not installed."""
    from fn.kernels.cpu import numba

    return numba.row(device_type)
