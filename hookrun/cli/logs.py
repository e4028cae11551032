"""Logging: shows Hydra's lines about a sweep on stdout, and restores every logger afterwards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig

_TALKS = ("hydra", "hydra_plugins")  # launchers and sweepers, Hydra's own and installed ones


@contextmanager
def loggers_restored() -> Iterator[None]:
    """Undo what Hydra's logging configuration does to handlers, levels and loggers."""
    root = logging.getLogger()
    known = [root, *(item for item in root.manager.loggerDict.values() if isinstance(item, logging.Logger))]
    before = [(log, log.level, log.handlers[:], log.propagate, log.disabled) for log in known]
    try:
        yield
    finally:
        for log, level, handlers, propagate, disabled in before:
            if log.level != level:  # setting a level empties the caches of all loggers
                log.setLevel(level)
            for added in [each for each in log.handlers if each not in handlers]:
                added.close()
            log.handlers[:] = handlers
            log.propagate, log.disabled = propagate, disabled


@contextmanager
def sweep_lines(cfg: DictConfig) -> Iterator[None]:
    """Show what launchers and sweepers log, as Hydra's own logging configuration would.

    Hydra's configuration adds its handler to the root logger, so that lines of every library would look like Hydra's.
    `config.yaml` therefore turns it off. Any other choice of `hydra/hydra_logging` is used as it is.
    """
    if cfg.hydra.hydra_logging.get("root") is not None:
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s][HYDRA] %(message)s"))
    level = logging.DEBUG if cfg.hydra.verbose is True else logging.INFO
    talkers = [logging.getLogger(name) for name in _TALKS]
    for talker in talkers:
        talker.addHandler(handler)
        talker.setLevel(level)
    try:
        yield
    finally:
        for talker in talkers:
            talker.removeHandler(handler)
            talker.setLevel(logging.NOTSET)
