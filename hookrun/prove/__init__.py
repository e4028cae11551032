"""Checks a plan on a copy of the model before a run."""
