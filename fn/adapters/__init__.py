"""The only modules that mutate: pure transforms behind stateful interfaces."""

from fn.adapters.agreed_params import agreed_params
from fn.adapters.from_adamw import from_adamw

__all__ = ["agreed_params", "from_adamw"]
