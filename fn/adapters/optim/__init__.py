"""`fn.Optimizer`: any transform behind the interface of `torch.optim`."""
