"""The keys at the root of an experiment: the sections of `hookrun.spec.Settings`, and `hooks`.

A module of its own: the command line explains a mistyped key without building the classes that validate sections.
"""

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
