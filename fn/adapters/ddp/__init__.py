"""`torch.nn.parallel.DistributedDataParallel`, with the communication of `fn`."""

from fn.adapters.ddp.buckets import BUCKET, bucketed
from fn.adapters.ddp.data_parallel import average_gradients, close, keep_local, optimizer, overlap

__all__ = ["BUCKET", "average_gradients", "bucketed", "close", "keep_local", "optimizer", "overlap"]
