"""The version, read by the build as well."""

from __future__ import annotations

__version__ = "0.6.1"
