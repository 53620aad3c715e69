"""Drop-ins for DeepSpeed's `OnebitAdam`, `OnebitLamb` and `ZeroOneAdam`: their arguments and their numbers."""

from fn.adapters.deepspeed.loco import LocoErrors, loco_quant_reduce, quant_reduce
from fn.adapters.deepspeed.optimizers import OnebitAdam, OnebitLamb, ZeroOneAdam, from_config

__all__ = ["LocoErrors", "OnebitAdam", "OnebitLamb", "ZeroOneAdam", "from_config", "loco_quant_reduce", "quant_reduce"]
