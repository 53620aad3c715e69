"""Kits for who writes a codec, a transform or the kernels of a device: each returns a report that is true if all holds.

    assert fn.testing.check_codec(my_codec())
    assert fn.testing.check_transform(my_transform(axis="data"), params, fn.freeze_after(10))
    assert fn.testing.conformance(my_row())

`pytest -p fn.testing.pytest_plugin --fn-row my_package.kernels:row` makes a test of every kernel of a row.
`python -m fn.testing.world --count 100` lets faults happen to islands in simulated time, see `fn.testing.world`.
`train` shows in one line that an optimizer learns; the docstrings of the named optimizers call it.
"""

from fn.testing.codec import check_codec
from fn.testing.kernels import conformance
from fn.testing.quadratic import train
from fn.testing.transform import check_transform

__all__ = ["check_codec", "check_transform", "conformance", "train"]
