"""Measurements that need one GPU, in one run of a few minutes: `python -m benchmarks cuda`."""
