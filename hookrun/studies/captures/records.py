"""probes.safetensors: weight and bias of the probe of each module."""

from __future__ import annotations

PROBES = "probes.safetensors"
