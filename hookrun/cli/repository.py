"""Hydra's list of config folders, with cheaper copies: every composition and look-up of a config group copies it.

Only this file, `hookrun.cli.hydra` and `hookrun.cli.loader` import Hydra's private modules.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_repository import ConfigRepository


class Repository(ConfigRepository):
    """A repository whose deep copies share their sources: Hydra's also copies every config that code registered.

    Hydra copies it to call `initialize_sources`, which gives the copy a new list; the sources are never changed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Repository:
        return copy.copy(self)
