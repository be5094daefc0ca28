"""The GPU checks that `benchmarks/gpu.py` runs.

Cases are data (`kernel_cases`, `model_cases`), which `runner` runs; `speed` times.
"""
