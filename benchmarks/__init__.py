"""Benchmarks, whose ratios are measured in one process.

``python -m benchmarks`` measures on this machine and writes what the docs say; ``gpu.py`` builds,
checks and times the CUDA backend; ``python -m benchmarks.mutants`` measures the tests.
"""
