"""Quantized gradients, with error feedback, inside PyTorch's own ZeRO-3: FSDP2."""

from fn.adapters.fsdp.fully_shard import Compressed, Part, Replicas, compress

__all__ = ["Compressed", "Part", "Replicas", "compress"]
