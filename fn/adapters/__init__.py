"""The only modules that mutate: pure transforms behind stateful interfaces."""

from fn.adapters.agreed_params import agreed_params
from fn.adapters.from_adamw import from_adamw
from fn.adapters.optim.gradients import check_max_grad_norm

__all__ = ["agreed_params", "check_max_grad_norm", "from_adamw"]
