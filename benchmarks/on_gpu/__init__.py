"""The GPU checks: what `benchmarks/gpu.py` runs. Cases are data (`kernel_cases`, `model_cases`), `runner` runs them."""
