"""From text to a checked mapping. Importing this package imports nothing: the command line explains keys by it."""

ROOT_KEYS = (
    "task",
    "model",
    "data",
    "train",
    "compute",
    "hooked",
    "seed",
    "strict",
    "objective",
    "baseline",
    "vars",
    "needs",
    "tags",
    "hooks",
)
"""The keys at the root of an experiment: the sections of `hookrun.spec.Settings`, and `hooks`."""
