"""The only modules that mutate: pure transforms behind stateful interfaces."""

from fn.adapters.agreed_params import agreed_params
from fn.adapters.from_adamw import from_adamw
from fn.adapters.from_muon import from_muon
from fn.adapters.torch_optimizer import torch_optimizer

__all__ = ["agreed_params", "from_adamw", "from_muon", "torch_optimizer"]
