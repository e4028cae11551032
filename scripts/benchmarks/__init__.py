"""What hooks cost: bare PyTorch, hand-written hooks, other libraries and hookrun side by side in one run.

Absolute times differ between machines and moments; a ratio of two runs side by side does not. So every table here is
made of interleaved rounds, and a ratio is the median of the rounds' own ratios.
"""
