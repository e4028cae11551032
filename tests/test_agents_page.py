"""The page for programs: everything that can be asked is on it, it is short, and its commands work as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from hookrun import cli
from hookrun.command import schema
from hookrun.command.json_form import output_schema
from hookrun.engine.actions import actions
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.spec.hook import HookKeys
from hookrun.run.tasks import tasks

PAGE = (Path(__file__).parents[1] / "hookrun" / "AGENTS.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"`(my_conf/\S+)`:\n\n```yaml\n(.*?)```\n\n```sh\n(.*?)```", PAGE, re.DOTALL)
FORM = Draft202012Validator(output_schema())


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main(["--agents"]) == 0
    assert capsys.readouterr().out == PAGE


def test_all_that_can_be_asked_is_on_the_page() -> None:
    for name in [*tasks(), *HookKeys.model_fields, *HOOK_TYPES, *actions()]:
        assert f"`{name}`" in PAGE, name


def test_the_page_is_short_and_of_plain_text() -> None:
    assert len(PAGE.encode()) <= 12 * 1024
    assert "http" not in PAGE


@pytest.mark.parametrize(("path", "content", "command"), EXAMPLES, ids=[path for path, _, _ in EXAMPLES])
def test_an_example_runs_as_it_stands_on_the_page(
    path: str,
    content: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(path)
    file.parent.mkdir(parents=True)
    file.write_text(content, encoding="utf-8")
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "hookrun"]
    assert cli.main([*words[3:], "compute.device=cpu"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    FORM.validate(answer)
    assert answer["ok"]
    hooks = set(yaml.safe_load(content)["hooks"])
    for run in answer.get("jobs", [answer]):
        assert run["status"] == "done"
        assert run["metrics"] or answer["answer"]
        assert Path(run["run"], "report.html").is_file()
        if "-m" not in words:
            assert set(run["fired"]) <= hooks


def test_the_page_has_five_examples_and_both_other_commands() -> None:
    assert len(EXAMPLES) == 5
    for words in ("python -m hookrun.schema --output", "python -m hookrun task=modules model=cnn --json"):
        assert f"`{words}`" in PAGE


def test_the_fix_on_the_page_is_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
    hook = "+hooks.a={select: fcc, hook: forward, action: capture}"
    assert cli.main([hook, "task=plan", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    FORM.validate(answer)
    assert [{**each, "what": ""} for each in answer["mistakes"]] == [{**shown, "what": ""}]
    fix = shown["fix"]
    assert cli.main([hook, f"{fix['key']}={fix['value']}", "task=plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["hooks"][0]["matches"] == ["fc"]
