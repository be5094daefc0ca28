"""What ``python benchmarks/gpu.py`` runs: building, checking and timing the CUDA backend on a machine with a GPU."""
