"""Communication-efficient optimizers for PyTorch, as pure functions."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

# At once: they bring torch operators, without which a program that was exported cannot be loaded. What is above them,
# transforms, optimizers and adapters, is imported when one of its names is used: see `__getattr__`.
from fn import kernels
from fn.base import Exchange, Phase, Round, Transform, UpdateFn, apply_updates, chain, lift, stateless
from fn.collectives.axis import axis_index, axis_size, bind, rank_dims
from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.bins import bins
from fn.collectives.codecs.codec import Codec, identity
from fn.collectives.codecs.e3m0 import e3m0
from fn.collectives.codecs.fp8 import fp8
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.codecs.rotated import rotated
from fn.collectives.codecs.sign import sign
from fn.collectives.codecs.top_k import top_k
from fn.collectives.compressed import ErrorFeedbackState, all_gather_shards, reduce_scatter_mean
from fn.collectives.feedback import Feedback, classic, damped, decayed, differences, off
from fn.collectives.following import recorded, replayed
from fn.collectives.ledger import Ledger, ledger
from fn.collectives.primitives import all_gather, all_to_all, permute, pmean, psum
from fn.collectives.simulation import simulate
from fn.errors import CheckpointDamaged, PeerLost, RanksDisagree, RanksDrifted
from fn.facts import Facts
from fn.roles import Roles
from fn.schedules import every, every_seconds, freeze_after, freeze_when_stable, periodic, zero_one_schedule
from fn.version import __version__ as __version__

if TYPE_CHECKING:
    from fn import testing as testing
    from fn.adapters.donate import donate
    from fn.adapters.flatten import flatten_parameters
    from fn.adapters.labels import labels_of
    from fn.adapters.optim.optimizer import Optimizer
    from fn.lamb_optimizers import lamb, onebit_lamb
    from fn.local_optimizers import diloco, local_sgd, muloco, sparse_loco
    from fn.low_rank_optimizers import dion, powersgd_adamw
    from fn.muon_optimizers import muon, normuon, sign_muon
    from fn.optimizers import adamw, loco_adamw, onebit_adam, sharded_onebit_adam
    from fn.transforms.adam import scale_by_adam, scale_by_onebit_adam
    from fn.transforms.average import average, compressed_average
    from fn.transforms.average_params import average_params
    from fn.transforms.bases import dct, in_basis, tiles
    from fn.transforms.clip import clip_by_global_norm
    from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
    from fn.transforms.lamb import scale_by_onebit_lamb, scale_by_trust_ratio
    from fn.transforms.late import late
    from fn.transforms.lion import scale_by_lion
    from fn.transforms.low_rank import low_rank_average
    from fn.transforms.mask_and_partition import mask, partition, unfrozen
    from fn.transforms.momentum import local_momentum, running_sum, trace
    from fn.transforms.muon import orthogonalize, scale_by_muon, scale_by_neuron_norm
    from fn.transforms.outer import OuterState, outer
    from fn.transforms.owned import owned
    from fn.transforms.scaling import scale, scale_by_shape, scale_by_sign
    from fn.transforms.sharded import sharded
    from fn.transforms.skip_nonfinite import skip_nonfinite
    from fn.transforms.unsharded import Shards, unsharded
    from fn.transforms.zero_one_adam import scale_by_zero_one_adam
    from fn.vote_optimizers import lion_vote
    from fn.zero_one_optimizers import zero_one_adam

    contrib: Any  # whose names are found when they are used

__all__ = [
    "CheckpointDamaged",
    "Codec",
    "ErrorFeedbackState",
    "Exchange",
    "Facts",
    "Feedback",
    "Ledger",
    "Optimizer",
    "OuterState",
    "PeerLost",
    "Phase",
    "RanksDisagree",
    "RanksDrifted",
    "Roles",
    "Round",
    "Shards",
    "Transform",
    "UpdateFn",
    "adamw",
    "add_decayed_weights",
    "all_gather",
    "all_gather_shards",
    "all_to_all",
    "apply_updates",
    "average",
    "average_params",
    "axis_index",
    "axis_size",
    "ballots",
    "bind",
    "bins",
    "chain",
    "classic",
    "clip_by_global_norm",
    "compressed_average",
    "damped",
    "dct",
    "decayed",
    "differences",
    "diloco",
    "dion",
    "donate",
    "e3m0",
    "every",
    "every_seconds",
    "flatten_parameters",
    "fp8",
    "freeze_after",
    "freeze_when_stable",
    "identity",
    "in_basis",
    "int4",
    "int8",
    "kernels",
    "labels_of",
    "lamb",
    "late",
    "ledger",
    "lift",
    "lion_vote",
    "local_momentum",
    "local_sgd",
    "loco_adamw",
    "low_rank_average",
    "mask",
    "muloco",
    "muon",
    "normuon",
    "off",
    "onebit_adam",
    "onebit_lamb",
    "orthogonalize",
    "outer",
    "owned",
    "partition",
    "periodic",
    "permute",
    "pmean",
    "powersgd_adamw",
    "psum",
    "rank_dims",
    "recorded",
    "reduce_scatter_mean",
    "replayed",
    "rotated",
    "running_sum",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_neuron_norm",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "scale_by_shape",
    "scale_by_sign",
    "scale_by_trust_ratio",
    "scale_by_zero_one_adam",
    "sharded",
    "sharded_onebit_adam",
    "sign",
    "sign_muon",
    "simulate",
    "skip_nonfinite",
    "sparse_loco",
    "stateless",
    "tiles",
    "top_k",
    "trace",
    "unfrozen",
    "unsharded",
    "zero_one_adam",
    "zero_one_schedule",
]

_MODULES = {
    "fn.adapters.donate": "donate",
    "fn.adapters.flatten": "flatten_parameters",
    "fn.adapters.labels": "labels_of",
    "fn.adapters.optim.optimizer": "Optimizer",
    "fn.lamb_optimizers": "lamb onebit_lamb",
    "fn.local_optimizers": "diloco local_sgd muloco sparse_loco",
    "fn.low_rank_optimizers": "dion powersgd_adamw",
    "fn.muon_optimizers": "muon normuon sign_muon",
    "fn.optimizers": "adamw loco_adamw onebit_adam sharded_onebit_adam",
    "fn.transforms.adam": "scale_by_adam scale_by_onebit_adam",
    "fn.transforms.average": "average compressed_average",
    "fn.transforms.average_params": "average_params",
    "fn.transforms.bases": "dct in_basis tiles",
    "fn.transforms.clip": "clip_by_global_norm",
    "fn.transforms.decay_and_lr": "add_decayed_weights scale_by_learning_rate",
    "fn.transforms.lamb": "scale_by_onebit_lamb scale_by_trust_ratio",
    "fn.transforms.late": "late",
    "fn.transforms.lion": "scale_by_lion",
    "fn.transforms.low_rank": "low_rank_average",
    "fn.transforms.mask_and_partition": "mask partition unfrozen",
    "fn.transforms.momentum": "local_momentum running_sum trace",
    "fn.transforms.muon": "orthogonalize scale_by_muon scale_by_neuron_norm",
    "fn.transforms.outer": "OuterState outer",
    "fn.transforms.owned": "owned",
    "fn.transforms.scaling": "scale scale_by_shape scale_by_sign",
    "fn.transforms.sharded": "sharded",
    "fn.transforms.skip_nonfinite": "skip_nonfinite",
    "fn.transforms.unsharded": "Shards unsharded",
    "fn.transforms.zero_one_adam": "scale_by_zero_one_adam",
    "fn.vote_optimizers": "lion_vote",
    "fn.zero_one_optimizers": "zero_one_adam",
}
"""Module -> the public names that it has, which type checkers see above."""

if not TYPE_CHECKING:  # a checker would take every misspelt name of fn for Any
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Import what has a public name, or a package of fn, when it is first used."""
        if name in _MODULE_OF:
            found = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
            return found
        if not name.startswith("_") and name in {found.name for found in pkgutil.iter_modules(__path__)}:
            return importlib.import_module(f"fn.{name}")
        raise AttributeError(f"module 'fn' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return the public names, also those that were not used yet."""
        return sorted({*globals(), *__all__})
