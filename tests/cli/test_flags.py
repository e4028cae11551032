"""For unknown flags, and words that are not overrides, the error shows what was probably meant."""

from __future__ import annotations

import pytest

from hookrun.cli import main

MEANT = {
    "--experiment clip_fc": "experiment=clip_fc",
    "--experiment=clip_fc": "experiment=clip_fc",
    "-experiment clip_fc": "experiment=clip_fc",
    "--task=plan": "task=plan",
    "--hooks.clip_fc.max 3": "hooks.clip_fc.max=3",
    "--epochs 3": "train.epochs=3",
    "--plan": "task=plan",
    "--config_dir x": "did you mean --config-dir?",
    "-config-dir x": "did you mean --config-dir?",
    "--multi-run seed=1,2": "did you mean --multirun?",
    "--multirun=seed=1,2": "put a space there: --multirun seed=1,2",
    "--cfg jobs": "it takes job, hydra, all",
    "--cfg": "it takes job, hydra, all",
    "--config-dir=missing": "there is no folder ",
    "--nonsense": "--help shows some uses",
    "experiment clip_fc": "write experiment=clip_fc",
    "experiment = clip_fc": "write experiment=clip_fc",
    "experiment =clip_fc": "write experiment=clip_fc",
    "experiment= clip_fc": "write experiment=clip_fc",
    "experiment:clip_fc": "did you mean experiment=clip_fc?",
    "plan": "did you mean task=plan?",
    "+hooks.x={select: fc, hook: grad}": 'quotes: "+hooks.x={select: fc, hook: grad}"',
}


def test_the_probable_override_or_flag_is_shown(capsys: pytest.CaptureFixture[str], notes) -> None:
    for typed, meant in MEANT.items():
        assert main(typed.split()) == 2, typed
        printed = capsys.readouterr()
        assert f"{meant}" in printed.err, typed
        assert printed.err.startswith("1 configuration error\n") and printed.out == "", typed


def test_a_flag_that_needs_another_flag_is_refused_alone(capsys: pytest.CaptureFixture[str], notes) -> None:
    for typed, goes_with in {"--resolve": "--cfg or --help", "--package hooks": "--cfg"}.items():
        assert main(typed.split()) == 2, typed
        assert f"goes with {goes_with}" in capsys.readouterr().err, typed


def test_values_that_hydra_reads_as_numbers_are_refused_as_names(
    capsys: pytest.CaptureFixture[str], notes
) -> None:
    for typed in (
        "experiment=null",
        "experiment=1.5",
        "model=inf",
        "experiment=true",
        "hooks=nan",
        "experiment=[nan]",
    ):
        assert main([typed]) == 2
        assert f"found '{typed.partition('=')[2]}', expected a name" in capsys.readouterr().err


def test_short_flags_with_their_choice_attached_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-cjob", "seed=7"]) == 0
    assert "seed: 7\n" in capsys.readouterr().out
