"""Habits of Hydra users: hooks=none, reruns from .hydra, tags, interpolations, keys beside task=plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hookrun.cli import main
from hookrun.compose.compose import compose_dict
from hookrun.tasks import parse_experiment

Conf = Callable[..., str]
HOOK = "{select: fc, hook: grad, action: print}"
TYPED = "+hooks.x={select: fc, hook: forward, action: print}"


INLINE = f"# @package _global_\ndefaults: [{{override /hooks: scale}}]\nhooks: {{print_a: {HOOK}, print_b: {HOOK}}}\n"
BELOW = f"# @package _global_\ndefaults: [mine]\nhooks: {{b: {HOOK}}}\n"


@pytest.mark.parametrize("none", ["hooks=none", "~hooks"])
@pytest.mark.parametrize("name", ["mine", "below"])
def test_hooks_none_switches_hooks_off_wherever_they_are_defined(none: str, name: str, conf: Conf) -> None:
    folder = conf(**{"experiment/mine": INLINE, "experiment/below": BELOW})
    experiment = f"experiment={name}"
    assert len(parse_experiment(compose_dict([experiment], folder)).hooks.hooks) >= 3
    config = compose_dict([none, experiment], folder)
    assert config["hooked"] is False and "print_a" in config["hooks"]
    assert parse_experiment(config).hooks.hooks == ()
    config = compose_dict([TYPED, experiment, none], folder)
    assert config["hooked"] is True and list(config["hooks"]) == ["x"]
    assert compose_dict([none, experiment, "hooked=true"], folder)["hooked"] is True


@pytest.mark.parametrize("none", ["hooks=none", "~hooks"])
def test_a_hook_may_be_deleted_beside_hooks_none(none: str, conf: Conf, notes, capsys) -> None:
    folder = conf(**{"experiment/mine": INLINE})
    gone = [none, "~hooks.print_a", "~hooks.print_b"]
    assert compose_dict(["experiment=mine", *gone], folder)["hooked"] is False
    assert list(compose_dict([*gone, "experiment=mine", TYPED], folder)["hooks"]) == ["x"]
    line = ["--config-dir", folder, "experiment=mine", none, "~hooks.print_a"]
    assert main([*line, "-m", "seed=5,6"]) == 0
    assert [len(each.hooks.hooks) for each, _ in notes.prepared[-2:]] == [0, 0]
    for more in (["~hooks.prnt_b"], ["-m", "seed=5,6", "~hooks.prnt_b"]):
        capsys.readouterr()
        assert main([*line, *more]) == 2
        said = capsys.readouterr().err
        assert "~hooks.prnt_b: there is no such key" in said and "did you mean 'hooks.print_b'" in said


def test_hooks_that_are_switched_off_are_checked(notes, capsys) -> None:
    assert main(["experiment=clip_fc", "hooked=false", "hooks.clip_fc.max=x"]) == 2
    assert "hooks.clip_fc.max: found 'x'" in capsys.readouterr().err
    assert main(["experiment=clip_fc", "hooked=maybe"]) == 2
    assert "hooked: found 'maybe'" in capsys.readouterr().err


def test_a_job_of_a_sweep_without_hooks(notes) -> None:
    assert main(["-m", "experiment=clip_fc", "hooks=none,scale", "task=plan"]) == 0
    names = [[hook.name for hook in shown.hooks.hooks] for shown in notes.shown]
    assert names[0] == [] and "clip_fc" in names[1]


def test_a_stored_configuration_can_be_run_again_in_a_new_directory(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "seed=5", "hydra.run.dir=old"]) == 0
    assert main(["--config-dir", "old/.hydra", "--config-name", "config", "hooks.clip_fc.max=0.5"]) == 0
    (seed, new) = notes.ran[1]
    assert (seed, new.parent) == (5, cwd / "outputs")
    assert sorted(path.name for path in new.iterdir()) == [".hydra", "status.json"], "no log of Hydra's"
    (first, _), (second, _) = notes.prepared
    assert first.hooks.hooks[0].action.max == 0.01 and second.hooks.hooks[0].action.max == 0.5
    assert main(["-m", "--config-dir", "old/.hydra", "--config-name", "config", "seed=5,6"]) == 0
    assert notes.ran[-1][1].parents[1] == cwd / "multirun"


def test_a_plan_accepts_the_keys_of_the_experiment_s_own_task(notes, capsys) -> None:
    assert main(["experiment=capture_features", "task=plan", "task.split=train"]) == 0
    assert main(["-m", "experiment=capture_features", "task=plan", "task.split=train,val"]) == 0
    assert [shown.settings.task.split for shown in notes.shown] == ["train", "train", "val"]
    assert main(["experiment=capture_features", "task=plan", "task.splt=train"]) == 2
    assert "task.splt: unknown key\n      did you mean 'split'" in capsys.readouterr().err


def test_errors_name_the_interpolation_of_a_value(notes, capsys) -> None:
    assert (
        main(
            [
                "experiment=clip_fc",
                "train.epochs=${data.name}",
                "hooks.clip_fc.action=a${seed}",
                "+hooks.x=${train}",
            ]
        )
        == 2
    )
    printed = capsys.readouterr().err
    assert "train.epochs: found 'digits' (from ${data.name}): expected a valid integer" in printed
    assert "hooks.clip_fc.action: found 'a0' (from a${seed}), which is not an action" in printed
    assert "hooks.x.select: is missing (hooks.x is ${train})" in printed


def test_tags_are_the_user_s_own_words(notes, capsys) -> None:
    assert main(["tags=[paper,baseline]", "seed=5"]) == 0
    assert notes.prepared[0][0].settings.tags == ("paper", "baseline")
    assert main(["tags=paper"]) == 2
    assert "tags: found 'paper': expected a valid list" in capsys.readouterr().err


def test_a_quick_preset() -> None:
    train = compose_dict(["train=quick"])["train"]
    assert (train["epochs"], train["log_every"]) == (1, 1) and train["limit_batches"] <= 10


@pytest.mark.parametrize("key", ["off", "no", "on"])
def test_the_error_for_a_hook_named_like_a_boolean_says_to_quote_it(
    key: str, conf: Conf, notes, capsys
) -> None:
    hook = "{select: fc, hook: forward, action: print}"
    folder = conf(**{"experiment/mine": f"# @package _global_\nhooks:\n  {key}: {hook}\n  null: {hook}\n"})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "quote what YAML reads as something else" in capsys.readouterr().err
    folder = conf(**{"experiment/mine": f"# @package _global_\nhooks: {{{key}: {hook}}}\n"})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "as true and false: quote the key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "places"),
    [
        (["hooks.clip_fc.mx=3", "trian.epochs=3", "seed=-1"], ["hooks.clip_fc.mx", "trian.epochs"]),
        (["hooks.clip_fc.max=abc", "seed=-1"], ["hooks.clip_fc.max", "seed"]),
    ],
    ids=["keys", "values"],
)
def test_wrong_keys_are_told_before_wrong_values(typed: list[str], places: list[str], notes, capsys) -> None:
    assert main(["experiment=clip_fc", *typed]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n")
    for where in places:
        assert f"\n  {where}: " in printed
