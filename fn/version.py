"""The version of this package, which ranks compare."""

__version__ = "0.4.0.dev0"
