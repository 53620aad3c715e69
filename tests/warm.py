"""What all ranks begin with, done once in the server that they are forked from: imports, and trying all kernels.

A rank that does this itself does little else. No thread may start here, since a fork has none.
"""

import gc

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
from fn.kernels.schemas import SCHEMAS
from fn.kernels.table import warm

torch.set_num_threads(1)
for name in fn.__all__:
    getattr(fn, name)  # imported when it is used
warm(SCHEMAS, "cpu")
gc.freeze()  # else the first collection of every rank looks at all of this, and copies its memory
