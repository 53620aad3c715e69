"""Parameters as views of one flat buffer, on any device."""

from fn.adapters.flatten.flatten import FlatParameters, flatten_parameters

__all__ = ["FlatParameters", "flatten_parameters"]
