"""Islands that come and go, by torchft's quorum: `connect` finds the others, and `optimizer` trains with them."""

from fn.adapters.torchft.connect import connect
from fn.adapters.torchft.islands import optimizer

__all__ = ["connect", "optimizer"]
