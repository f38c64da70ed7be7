"""Benchmarks: `python -m bench kernels | step | report`.

cases -> inputs -> kernels (ours and the baselines of peers) -> timer -> results -> report.
"""
