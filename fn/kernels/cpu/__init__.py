"""The row of CPUs in Numba; `numba` makes it. Only `blocks` is imported where Numba is not installed."""
