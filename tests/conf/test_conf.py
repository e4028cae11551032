"""The config folders: every choice composes to a valid experiment, and the public keys are these."""

from __future__ import annotations

import shlex
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from hookrun.cli import main
from hookrun.command.compose.compose import compose_dict
from hookrun.data.settings import Data
from hookrun.engine.validation import Section
from hookrun.models.settings import Model
from hookrun.run.experiment.settings import Compute, Train
from hookrun.run.tasks import Task, parse_experiment, tasks

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
EXPERIMENTS = [
    path.relative_to("experiment").with_suffix("").as_posix()
    for path in FILES
    if path.parts[0] == "experiment"
]
CHOICES = [
    f"{path.parent.parts[0]}={Path(*path.parts[1:]).with_suffix('')}"
    for path in FILES
    if len(path.parts) > 1 and path.parts[0] not in ("hydra", "experiment")
]


def test_public_keys_are_overridden_without_a_plus() -> None:
    keys = [key for key in leaves(compose_dict()) if not key.startswith("model.args.")]
    assert sorted(keys) == PUBLIC.split()


@pytest.mark.parametrize(
    ("section", "model"), [("model", Model), ("data", Data), ("train", Train), ("compute", Compute)]
)
def test_a_section_lists_every_key_that_it_may_have(section: str, model: type[Section]) -> None:
    section_of = {name: [f"{name}=python", f"{name}.factory=mypkg.own:build"] for name in ("model", "data")}
    assert set(compose_dict(section_of.get(section, []))[section]) == set(model.model_fields)


def test_there_is_a_file_for_every_task() -> None:
    assert {path.stem for path in FILES if path.parts[0] == "task"} == set(tasks())


@pytest.mark.parametrize(("name", "task"), tasks().items())
def test_the_file_of_a_task_lists_its_keys(name: str, task: type[Task]) -> None:
    section = compose_dict([f"task={name}"])["task"]
    assert section.pop("name") == name
    assert set(section) == (
        set() if task.task_name == "plan" else set(task.model_fields)
    )  # plan: those of another task


def one_of_each_group() -> list[list[str]]:
    """Every choice once, in as few command lines as there are choices in the largest group."""
    groups = dict[str, list[str]]()
    for choice in CHOICES:
        groups.setdefault(choice.partition("=")[0], []).append(choice)
    return [[choice for choice in row if choice] for row in zip_longest(*groups.values())]


@pytest.mark.parametrize("choices", one_of_each_group())
def test_every_choice_gives_a_valid_experiment(choices: list[str]) -> None:
    own = [f"{group}.factory=mypkg.own:build" for group in ("model", "data") if f"{group}=python" in choices]
    parse_experiment(compose_dict([*choices, *own]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_a_comment_on_what_it_shows(name: str) -> None:
    header, comment = (CONF / f"experiment/{name}.yaml").read_text().splitlines()[:2]
    assert header == "# @package _global_"
    assert comment.startswith("# ")
    assert len(comment) < 100


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.startswith("tutorial/")])
def test_the_command_line_changes_the_task_of_a_tutorial(name: str) -> None:
    assert compose_dict([f"experiment={name}", "task=evaluate"])["task"]["name"] == "evaluate"


# Those of the tutorials run, with their figures, in tests of their own.
def test_the_task_of_an_experiment_can_be_changed_to_plan(tmp_path: Path) -> None:
    """Each composes; one of each task is run. That the hooks of each fit its model is tested in test_experiments.py."""
    shown = dict[str, str]()
    for name in EXPERIMENTS:
        if not name.startswith("tutorial/"):
            file = yaml.safe_load((CONF / f"experiment/{name}.yaml").read_text())
            chosen = [
                entry["override /task"] for entry in file.get("defaults", []) if "override /task" in entry
            ]
            shown[chosen[0] if chosen else "train"] = name
            parse_experiment(compose_dict([f"experiment={name}", "task=plan"]))
    assert len(shown) >= 5
    for name in shown.values():
        assert main([f"experiment={name}", "task=plan", "compute=cpu"]) == 0, name
        assert list(tmp_path.iterdir()) == [], name


def test_the_commands_in_the_comments_are_valid() -> None:
    for name in EXPERIMENTS:
        for line in (CONF / f"experiment/{name}.yaml").read_text().splitlines():
            if line.startswith("#   hookrun experiment="):
                _, *overrides = shlex.split(line.removeprefix("#"), comments=True)
                parse_experiment(compose_dict(overrides))


@pytest.mark.parametrize("path", FILES)
def test_files_hold_no_code(path: Path) -> None:
    text = (CONF / path).read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) < 60
    assert "_target_" not in text
    for key in yaml.safe_load(text) or {}:
        assert key not in ("on", "off", True, False)


PUBLIC = """
baseline
compute.capture_buffer compute.compile compute.deterministic compute.device
compute.fsdp.mixed_precision compute.fsdp.reshard_after_forward compute.fsdp.wrap compute.precision compute.strategy
compute.threads compute.timeout
data.args data.batch_size data.collate data.name data.root data.train_transforms data.transforms data.workers
hooked
hooks
model.name model.strip_prefix model.weights
note
objective.direction
objective.metric
objective.of objective.over
seed
strict
tags
task.loggers task.max_rows task.metrics task.name task.tensorboard task.tokens
train.accumulate train.checkpoint.every.epochs
train.checkpoint.every.minutes train.checkpoint.every.steps train.checkpoint.keep train.checkpoint.keep_done
train.checkpoint.save train.clip_grad_norm train.clip_grad_value train.ema train.epochs
train.limit_batches train.log_every train.loss train.on_nonfinite
train.optimizer.groups train.optimizer.lr train.optimizer.name train.output
train.parameters train.scheduler train.shuffle train.steps
"""


def leaves(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [path]
    return [leaf for key in node for leaf in leaves(node[key], f"{path}.{key}".lstrip("."))]
