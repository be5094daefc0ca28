"""The GPU checks that `benchmarks/gpu.py` runs.

Cases are data (`kernel_cases`, `model_cases`). `exact` computes the results that some of them must
have, and `runner` runs them.
"""
