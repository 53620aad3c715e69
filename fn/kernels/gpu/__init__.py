"""The rows of GPUs: `triton` for CUDA, ROCm and XPU, `cupy` for CUDA. Each imports its package when it is asked."""
