"""The software and the machine of a run, for env.json."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hookrun.version import __version__


def environment(argv: Sequence[str] | None = None, device: str | None = None) -> dict[str, Any]:
    """Versions, machine and command line of a run; values of environment variables are left out.

    argv:   the command line; default: that of this process
    device: the device that the run uses; default: the machine's accelerator, else cpu
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device) if device is not None else accelerator or torch.device("cpu")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "hydra": _version("hydra-core"),
        "hookrun": __version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": str(chosen),
        "device_name": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "argv": list(sys.argv if argv is None else argv),
    }


@cache
def _version(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
