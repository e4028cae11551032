"""`--help` lists what is available, including a user's own folder, and imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from hookrun.actions import actions
from hookrun.cli import main
from hookrun.tasks import tasks

Conf = Callable[..., str]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["--help", *arguments]) == 0
        return capsys.readouterr().out

    return run


def section(text: str, title: str) -> str:
    return next(block for block in text.split("\n\n") if block.startswith(title))


def test_it_describes_hookrun_and_its_usage(help_of) -> None:
    text = help_of()
    assert text.startswith("hookrun: PyTorch hooks as configuration\n")
    assert "hookrun experiment=clip_fc task=plan" in text
    assert 'eval "$(hookrun -sc install=bash)"' in text


def test_every_task_action_and_choice_is_listed(help_of) -> None:
    text = help_of()
    assert all(f"  {name} " in section(text, "Tasks") for name in tasks())
    listed = section(text, "Actions").partition("\n")[2]
    assert "".join(listed.split()).split(",") == list(actions())  # as found by importing their modules
    assert "cnn" in section(text, "Models")
    assert "digits" in section(text, "Data sets")
    assert "none" in section(text, "Hook sets")


def test_an_experiment_is_listed_with_its_first_sentence(help_of, conf: Conf) -> None:
    folder = conf(
        **{
            "experiment/mine": "# @package _global_\n\n# What I am\n# after. More of it.\nseed: 1\n",
            "experiment/silent": "# @package _global_\nseed: 1\n# late\n",
            "experiment/sub/deep": "# @package _global_\n# Deep down.\n",
        }
    )
    lines = section(help_of("--config-dir", folder), "Experiments").splitlines()
    for words in (["mine", "What I am after"], ["silent"], ["sub/deep", "Deep down"]):
        assert words in [re.split("  +", line.strip()) for line in lines]


def test_long_names_in_one_folder_do_not_widen_the_columns_of_others(help_of, conf: Conf) -> None:
    sentence = "Long enough to fill all of the line that a short name leaves, and not one word more"
    folder = conf(
        **{
            "experiment/mine": f"# @package _global_\n# {sentence}.\n",
            "experiment/sub/a_name_that_is_longer_than_any_other": f"# @package _global_\n# {sentence}.\n",
        }
    )
    text = help_of("--config-dir", folder)
    (line,) = [line for line in text.splitlines() if line.startswith("  mine ")]
    assert line.endswith(sentence)
    assert "sub/a_name_that_is_longer_than_any_other  Long enough to fill" in text


def test_the_summaries_of_shipped_files_are_not_truncated(help_of) -> None:
    assert "…" not in help_of()


def test_no_line_is_too_long_to_read(help_of) -> None:
    assert max(map(len, help_of().splitlines())) <= 110


def test_another_help_template_of_hydra_still_works(help_of) -> None:
    text = help_of("hydra/help=default", "seed=7")
    assert "experiment: activation_patching, add_bias, " in text
    assert "seed: 7" in text
