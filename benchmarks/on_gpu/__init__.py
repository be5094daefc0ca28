"""The GPU checks: what `benchmarks/gpu.py` runs. Cases are data (`kernel_cases`, `model_cases`),
`exact` has what some are to give, `runner` runs them."""
