"""Installs the hooks of a plan on a model and removes them."""

from __future__ import annotations

from hookrun.engine.runtime.install import Installation

__all__ = ["Installation"]
