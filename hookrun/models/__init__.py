"""Models by name: hookrun's own small ones, torchvision's, transformers', and a user's factory. Imports no torch."""

from __future__ import annotations

from hookrun.models.registry import build, names, own_names
from hookrun.models.weights import RANDOM, applied_hooks, load_weights, origin

__all__ = ["RANDOM", "applied_hooks", "build", "load_weights", "names", "origin", "own_names"]
