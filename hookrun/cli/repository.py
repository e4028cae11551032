"""Hydra's list of config folders, which Hydra copies for each composition and each listing of a group.

With `hookrun.cli.hydra` and `hookrun.cli.loader` the only files that import Hydra's private modules.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_repository import ConfigRepository


class Repository(ConfigRepository):
    """Hydra's repository with cheap copies, which share their sources instead of copying every config set by code.

    `initialize_sources`, for which Hydra copies it, gives the copy another list; no source is ever changed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Repository:
        return copy.copy(self)
