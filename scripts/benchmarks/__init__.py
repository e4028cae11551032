"""Benchmarks of hooks: bare PyTorch, hand-written hooks, other libraries and hookrun side by side in one run.

Absolute times differ between machines and over time; the ratio of two runs side by side hardly does. Therefore all
ways are timed in interleaved rounds, and a ratio is the median of the ratios of each round.
"""
