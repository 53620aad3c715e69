"""What carries the messages: torch.distributed, connections of our own beside gloo's, MPI, or a transport by name."""

from fn.collectives.transports.registry import Transport, register, registered

__all__ = ["Transport", "register", "registered"]
