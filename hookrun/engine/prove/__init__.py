"""Checks a plan on a copy of the model before a run."""

from hookrun.engine.values.private_names import require

require("torch")
