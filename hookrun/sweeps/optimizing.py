"""Sets the direction of the objective for sweepers that choose their jobs by it, and refuses a contradictory one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.errors import Problem, SpecError, spec_error
from hookrun.spec.objective import Direction, Goal
from hookrun.store.files import replacing
from hookrun.store.format import MULTIRUN

_SWEEPER = "hydra.sweeper"
_FAILURES = "max_failure_rate"


_SETTINGS: Mapping[str, Mapping[Direction, Any]] = {
    "direction": {"maximize": "maximize", "minimize": "minimize"},  # optuna
    "ax_config.experiment.minimize": {"maximize": False, "minimize": True},
    "optim.maximize": {"maximize": True, "minimize": False},  # nevergrad
}
"""Setting of a sweeper -> its value for each direction of the objective."""


def set_direction(cfg: DictConfig, goal: Goal) -> str:
    """Set the sweeper's direction unless it is set; returns a message.

    Raises SpecError where the sweeper was set to another direction, or to several objectives.
    """
    sweeper = cfg.hydra.sweeper
    message = f"objective: {goal}"
    setting = next((key for key in _SETTINGS if OmegaConf.select(sweeper, key) is not None), None)
    if setting is None:
        kind = str(sweeper.get("_target_", "")).rpartition(".")[2]
        return (
            f"{message}\nNOTE: {kind} has no setting that says which direction is better, as far as hookrun knows: "
            f"it gets the value unchanged. Make sure that it is set to {goal.direction}"
        )
    where, value = f"{_SWEEPER}.{setting}", OmegaConf.select(sweeper, setting)
    if OmegaConf.is_list(value):
        raise spec_error(
            where,
            f"found {OmegaConf.to_container(value)}, and a run has one objective, {goal.metric}",
            "leave it out: hookrun sets it by `objective`",
        )
    wanted = _SETTINGS[setting][goal.direction]
    # The plugin's default of `direction` is the member of an enumeration; the others are set if they were typed.
    is_set = not isinstance(value, Enum) if setting == "direction" else _is_typed(cfg, setting)
    value = value.lower() if isinstance(value, str) else value
    if not is_set:
        with read_write(sweeper), open_dict(sweeper):
            OmegaConf.update(sweeper, setting, wanted)
    elif value != wanted:
        what = f"found {value!r}, and the objective is to {goal.direction} {goal.metric}"
        other = "minimize" if goal.direction == "maximize" else "maximize"
        hint = f"leave one of them out; to {other} it, objective.direction={other}"
        of_goal = f"is {goal.direction!r} for {goal.metric}, and {where} is not"
        raise SpecError([Problem(where, what, hint), Problem("objective.direction", of_goal)])
    return message


def _is_typed(cfg: DictConfig, key: str) -> bool:
    typed = cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.hydra))
    return any(text.lstrip("+").startswith(f"{_SWEEPER}.{key}=") for text in typed)


def prepare_sweeper(cfg: DictConfig, sweep_dir: Path, seed: int) -> None:
    """Store the sweep's configuration, for `resume`, and give the sweeper the defaults of a sweep by hookrun.

    A sweep goes on after failed jobs, unless a failure rate was typed. A sampler without a seed gets the experiment's,
    so that a resumed sweep chooses the same jobs again: those that have finished return their stored values.
    """
    with replacing(sweep_dir / MULTIRUN) as file:
        file.write(OmegaConf.to_yaml(cfg).encode())
    sweeper = cfg.hydra.sweeper
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        if sweeper.get(_FAILURES) == 0 and not _is_typed(cfg, _FAILURES):
            sweeper[_FAILURES] = 1.0
        sampler = sweeper.get("sampler")
        if OmegaConf.is_dict(sampler) and sampler.get("seed", 0) is None:
            sampler.seed = seed % 2**32  # what NumPy's generators take
