"""The row of GPUs: `triton` for CUDA, ROCm and XPU, which imports its package when it is asked."""
