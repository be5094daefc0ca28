"""Per-tensor current scaling written out in plain PyTorch, without a kernel: to hold the kernels
against."""
