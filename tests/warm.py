"""What all ranks begin with, done once in the server that they are forked from: imports, and loading compiled kernels.

A rank that does this itself does little else. No thread may start here, since a fork has none; and the table of
kernels stays as empty as it is after an import, since some tests change what it finds.
"""

import gc
import importlib.util

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.func

import fn
import fn.kernels.bits
import fn.kernels.foreach  # noqa: F401
from fn.kernels.known_answers import examples, outcome

torch.set_num_threads(1)
if importlib.util.find_spec("numba"):
    from fn.kernels.cpu import numba as compiled

    for op, kernel in compiled.row("cpu").kernels.items():
        for args in examples(op):
            outcome(op, kernel, args, torch.device("cpu"))
gc.freeze()  # else the first collection of every rank looks at all of this, and copies its memory
