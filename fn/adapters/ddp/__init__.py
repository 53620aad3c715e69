"""`torch.nn.parallel.DistributedDataParallel`, with the communication of `fn`."""

from fn.adapters.ddp.data_parallel import BUCKET, average_gradients, bucketed, close, keep_local, optimizer, overlap

__all__ = ["BUCKET", "average_gradients", "bucketed", "close", "keep_local", "optimizer", "overlap"]
