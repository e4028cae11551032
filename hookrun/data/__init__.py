"""Data sets by name: descriptions of their samples, without reading the data, and the samples of a split in order."""

from __future__ import annotations

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.registry import PYTHON, describe, load, names, transforms_draw

__all__ = ["PYTHON", "DataInfo", "Split", "TensorInfo", "describe", "load", "names", "transforms_draw"]
