"""The machine and the package versions of a benchmark."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "hookrun",
    "torch",
    "torchvision",
    "hydra-core",
    "transformers",
    "captum",
    "h5py",
    "nnsight",
    "pyvene",
    "timm",
    "torchlens",
    "transformer-lens",
    "zarr",
)


def machine() -> dict[str, Any]:
    """Date, machine, load, and the versions of Python and all measured packages; None: not installed."""
    versions: dict[str, str | None] = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "date": date.today().isoformat(),
        "machine": f"{cores} cores of {processor()}, {platform.system()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
