"""Benchmarks: ratios measured in one process. ``python -m benchmarks`` writes results and the docs
page."""
