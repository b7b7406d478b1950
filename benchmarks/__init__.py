"""Timings of tsfunc beside torch.func, in one run: ``python -m benchmarks``."""
