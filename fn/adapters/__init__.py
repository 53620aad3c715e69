"""The only modules that mutate: pure transforms behind stateful interfaces."""

from fn.adapters.adamw import from_adamw

__all__ = ["from_adamw"]
