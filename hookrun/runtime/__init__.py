"""Plan -> installed hooks."""

from __future__ import annotations

from hookrun.runtime.install import Installation

__all__ = ["Installation"]
