"""Checkpoints of a training on many ranks: exact on the same number of ranks, and right on another one."""

from fn.adapters.checkpoint.save_load import gather, load, save, save_async

__all__ = ["gather", "load", "save", "save_async"]
