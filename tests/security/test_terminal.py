"""Control characters of a stranger's file do not reach the terminal, and folders of any name work or are refused."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.cli import main
from hookrun.run.passes.progress import Screen
from hookrun.store.verify import verify
from hookrun.terminal import Words

ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
EVIL = "a\x1b[31m\x07\x9b5m\u202ex\u2028y\rz\u2066"
YAML = r'"a\x1b[31m\x07\x9b5m\u202ex\u2028y\rz\u2066"'
HOOK = "hooks: {h: {select: '*', hook: forward, action: print%s}}"
QUICK = ["train.steps=1", "train.limit_batches=1", "data.batch_size=64"]

FILES = {
    "a key": "%s: 1",
    "a value": "seed: %s",
    "a hook": "hooks: {%s: {select: fc, hook: forward, action: print}}",
    "a key of a hook": HOOK % ", %s: 1",
    "a selector": "hooks: {h: {select: %s, hook: forward, action: print}}",
    "a class": "hooks: {h: {select: [%s, fc], hook: forward, action: print}}",
    "a target": HOOK % ", target: %s",
    "a path": "hooks: {h: {select: fc, hook: forward, action: replace, value: {file: %s}}}",
    "a function": "hooks: {h: {select: fc, hook: forward, action: python, function: %s}}",
    "model.args": "model: {args: {%s: 1}}",
    "weights": "model: {weights: %s}",
    "data": "data: {name: %s}",
    "needs": "needs: {%s: {experiment: clip_fc}}",
    "an experiment": "needs: {a: {experiment: %s}}",
    "overrides": "needs: {a: {experiment: clip_fc, overrides: [%s]}}",
    "a metric": "objective: {metric: %s}",
    "defaults": "defaults: [{override /model: %s}]",
}


@pytest.mark.parametrize("kind", FILES)
def test_an_error_about_a_file_escapes_its_texts(kind: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\n" + FILES[kind] % YAML, encoding="utf-8")
    assert main(["--config-dir", str(tmp_path), "experiment=mine", *QUICK]) == 2
    said = "".join(capsys.readouterr())
    assert r"\x1b[31m" in said
    assert not ACTING.search(said)


def test_help_escapes_the_texts_of_lists(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    tags = f'"[x],[{YAML[1:-1]}]"'
    swept = f"hydra: {{sweeper: {{params: {{tags: {tags}}}}}}}"
    file.write_text(f"# A {EVIL} file.\n# @package _global_\nseed: 1\n", encoding="utf-8")
    file.with_name("tagged.yaml").write_text(f"# @package _global_\ntags: [{YAML}]\n")
    file.with_name("swept.yaml").write_text(f"# @package _global_\n{swept}\n")
    typed = ["--config-dir", str(tmp_path)]
    for command in (
        [*typed, "--help"],
        [*typed, "experiment=tagged", "--cfg", "job"],
        ["-m", *typed, "experiment=swept", "task=plan"],
    ):
        main(command)
        said = "".join(capsys.readouterr())
        assert r"\u202e" in said, command
        assert not ACTING.search(said), command


def test_errors_in_python_escape_their_texts(capsys) -> None:
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(2, 2))
    spec = {"h": {"select": "*", "hook": "forward", "action": "print"}}
    hooks = hookrun.hooked(model, spec)
    with hooks:
        model(torch.ones(1, 2))
    said = str(hooks.plan) + str(hookrun.HookrunWarning(EVIL)) + "".join(capsys.readouterr())
    with (
        pytest.raises(hookrun.CompileError) as caught,
        hookrun.hooked(model, {"h": {**spec["h"], "select": "x"}}),
    ):
        pass
    said += str(caught.value)
    assert r"\x1b[31m" in said
    assert not ACTING.search(said)


def test_texts_of_all_languages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "é e\u0301 日本 \u3000 שלום نص\u200c 👩\u200d👩\u200d👧 \t\n"
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", Words(shown))
    for name in ("TERM", "COLORTERM"):
        monkeypatch.setenv(name, "xterm-256color")
    print(plain, end="")
    print("\r 50 %", end="")
    assert shown.getvalue() == f"{plain}\r 50 %"
    Screen().console.print(f"[{EVIL}]", style="bold")
    said = shown.getvalue()[len(plain) :]
    assert "\x1b[1m" in said
    assert r"\x1b[31m" in said
    assert "\x1b[31m" not in said
    assert "\u202e" not in said


def test_a_run_in_a_folder_of_any_name_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "{b,c}=d 'q\"" / "#% a\nb" / "[1] $HOME u\u2028v back\\slash"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert main(QUICK) == 0
    (run,) = Path("outputs").glob("2*")
    assert verify(run).bad == []
    assert main(["resume=latest"]) == 0


@pytest.mark.parametrize("name", ["${seed}", "${nope}", "\\${seed}", os.fsdecode(b"x\xff")])
def test_a_folder_that_a_configuration_cannot_name_is_refused(name, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for typed in (QUICK, ["-m", *QUICK, "seed=1"]):
        assert main(typed) == 2
        assert "in its name" in capsys.readouterr().err
    assert main(["task=plan"]) == 0
    assert [path.name for path in tmp_path.rglob("*")] == [name]


def test_a_sweep_starts_in_a_folder_called_like_an_interpolation(tmp_path, monkeypatch) -> None:
    (tmp_path / "${x}").mkdir()
    monkeypatch.chdir(tmp_path / "${x}")
    assert main(["-m", *QUICK, "task=evaluate", "seed=1", f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    assert verify(tmp_path / "sweep/0").bad == []


def test_help_keeps_its_width_beside_escaped_names(tmp_path, capsys) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    for name in ("\x1b[31m\x1b[2K" * 5, "x" * 60):
        (folder / f"{name}.yaml").write_text(f"# {EVIL * 4} and so on {'a long summary ' * 20}\n")
    assert main(["--config-dir", str(tmp_path), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  " + r"\x1b[31m\x1b[2K" * 5) for line in lines)
    for line in lines:
        assert len(line) <= 116
