"""Models by name: small ones of hookrun's own, torchvision's, and a user's factory. Imports no torch."""

from __future__ import annotations

from hookrun.models.registry import build, names, own_names
from hookrun.models.weights import RANDOM, applied_hooks, load_weights, origin

__all__ = ["RANDOM", "applied_hooks", "build", "load_weights", "names", "origin", "own_names"]
