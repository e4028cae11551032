"""Hydra's list of config folders, which each composition and each look at a config group takes a copy of.

With `hookrun.cli.hydra` and `hookrun.cli.loader` the only files that import Hydra's private modules.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_repository import ConfigRepository


class Repository(ConfigRepository):
    """Hydra's, whose copies share their sources: it copies all configs that were ever set by code along with them.

    `initialize_sources`, for which Hydra copies it, gives the copy another list; no source is ever changed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Repository:
        return copy.copy(self)
