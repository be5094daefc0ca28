"""Benchmarks, whose ratios are measured in one process.

``python -m benchmarks`` writes the results and the page in the docs.
"""
