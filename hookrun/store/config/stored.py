"""The YAML files that Hydra wrote into a run directory, read with as little trust as an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.data.info import ALL, SPLITS, Split
from hookrun.engine.validation import problems_of
from hookrun.errors import SpecError
from hookrun.store.files import MissingFile, StoreError, read_inside

if TYPE_CHECKING:
    from hookrun.data.settings import Data

MOST_YAML = 2**20
"""Most bytes of a YAML file."""


def read_yaml(path: Path, root: Path) -> Any:
    """The content with its interpolations unresolved; None if the file does not exist.

    root: the run directory, below which no link is followed

    StoreError if it is not YAML, or expands to more than a configuration may hold.
    """
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from hookrun.store.config.yaml_files import check_text, plain

    try:
        text = read_inside(path, root, limit=MOST_YAML).decode("utf-8")
        check_text(text)
        return plain(text)
    except MissingFile:
        return None
    except RecursionError as error:
        raise StoreError(f"{path} nests too deep for a configuration") from error
    except (ValueError, AssertionError, YAMLError, OmegaConfBaseException) as error:
        raise StoreError(f"{path} is not the YAML of a configuration: {str(error)[:300]}") from error


def data_used(config: Mapping[str, Any], path: Path) -> tuple[Data, Split, int]:
    """The data that a stored configuration names, checked as in an experiment, the split of its task, and its seed.

    The split is train if the task names none or `all`.

    Raises SpecError for settings that are invalid in an experiment too, StoreError if something is missing, or if the
    section exceeds the limits of an experiment with its interpolations resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError

    from hookrun.data.settings import Data
    from hookrun.store.config.interpolations import resolved

    task, seed, data = config.get("task"), config.get("seed"), config.get("data")
    split = task.get("split", SPLITS[0]) if isinstance(task, Mapping) else None
    if split == ALL:
        split = SPLITS[0]
    if split not in SPLITS or not isinstance(seed, int) or isinstance(seed, bool):
        raise StoreError(
            f"{path} does not say which data was used: it is missing, or has no task, task.split or seed"
        )
    try:
        if isinstance(data, Mapping) and "${" in str(data):
            data = resolved(OmegaConf.create(dict(config)).data)
        return Data.model_validate(data), split, seed
    except ValidationError as error:
        raise SpecError(problems_of(error, "data", Data)) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise StoreError(f"{path}: data cannot be resolved: {str(error)[:300]}") from error
