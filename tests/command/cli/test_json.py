"""`--json`: one object on stdout that its schema describes, for every command and however it ends."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import hookrun.compare
import hookrun.report.__main__
import hookrun.runs
import hookrun.schema
import hookrun.verify
from hookrun.cli import main
from hookrun.command.json_form import output_schema
from hookrun.store.reader import open_run
from hookrun.store.scores import last_metrics

SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu"]
CAPTURE = "+hooks.seen={select: fc, hook: forward, action: capture}"

Said = Callable[..., dict[str, Any]]


@pytest.fixture
def said(capsys, no_pages: None) -> Said:
    """What a command says; its exit code must be the one in the object, and stdout must hold nothing else."""

    def say(*typed: str, door: Callable[[list[str]], int] = main) -> dict[str, Any]:
        code = door([*typed, "--json"])
        (line,) = capsys.readouterr().out.splitlines()
        found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
        Draft202012Validator(output_schema()).validate(found)
        assert (found["version"], found["exit"], found["ok"]) == (1, code, code == 0)
        return found

    return say


# ---- one run -------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_matches_and_bytes_of_each_hook(said: Said) -> None:
    plan = said(*SMALL, CAPTURE, "data.batch_size=8", "task=plan")["plan"]
    clip = next(hook for hook in plan["hooks"] if hook["name"] == "clip_fc")
    seen = next(hook for hook in plan["hooks"] if hook["name"] == "seen")
    assert [clip["select"], clip["hook"], clip["action"]] == ["fc", "grad", "clamp"]
    assert clip["matches"] == ["fc.weight", "fc.bias"]
    assert (seen["matches"], seen["shape"], seen["bytes"]) == (["fc"], "[2, 10]", 10 * 4)
    assert plan["model"] == "CNN"


def test_a_plan_has_the_hash_that_the_run_records(said: Said) -> None:
    planned = said(*SMALL, "task=plan")["plan"]
    run = said(*SMALL)["run"]
    assert json.loads((Path(run) / "plan.json").read_text())["hash"] == planned["hash"]


def test_a_run_says_what_its_directory_holds(said: Said) -> None:
    found = said(*SMALL, "task=predict", "hooks=none", CAPTURE)
    run = open_run(found["run"])
    assert (found["status"], found["warnings"]) == ("done", [])
    assert found["fired"] == {"seen": {"fc": run.hooks["sites"][0]["fired"]}}
    rows = run.captures["seen"]["fc"]
    assert found["captures"] == {"seen": {"fc": {"shape": list(rows.shape), "dtype": "float32"}}}


def test_a_run_with_folds_names_their_file(said: Said) -> None:
    found = said(*SMALL, "task=predict", "hooks=none", "+hooks.f={select: fc, hook: forward, action: fold}")
    assert Path(found["folds"]).samefile(Path(found["run"]) / "folds.safetensors")
    assert "folds" not in said(*SMALL, "task=predict", "hooks=none", CAPTURE)


def test_metrics_of_a_run_are_the_same_to_the_last_bit(said: Said) -> None:
    found = said(*SMALL)
    assert found["metrics"] == last_metrics(open_run(found["run"]).metrics) != {}
    assert found["answer"] == {"what": "metrics", "metrics": found["metrics"]}


def test_a_finished_run_says_the_same_when_it_is_resumed(said: Said) -> None:
    first = said(*SMALL)
    assert said(f"resume={first['run']}") == first


def test_a_hook_that_did_nothing_is_a_warning(said: Said) -> None:
    never = "+hooks.never={select: fc, hook: forward, action: scale, factor: 2, when: {epoch: [7]}}"
    found = said(*SMALL, never)
    assert [line.split()[0] for line in found["warnings"]] == ["never"]


def test_the_modules_of_a_model_are_rows(said: Said) -> None:
    found = said("task=modules", "task.select=type:Conv2d")
    paths = [module["path"] for module in found["modules"]]
    assert paths[0] == ""
    assert found["selected"] == ["conv1", "conv2"]
    assert sum(module["parameters"] for module in found["modules"] if module["type"] == "Conv2d") == 37_312


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def test_every_mistake_is_told_with_its_place(said: Said) -> None:
    found = said("experiment=clip_fc", "hooks.clip_fc.action=clam", "train.epochs=many")
    assert found["exit"] == 2
    assert {mistake["where"] for mistake in found["mistakes"]} == {"hooks.clip_fc.action", "train.epochs"}
    assert "run" not in found


def test_a_selector_without_matches_names_the_nearest(said: Said) -> None:
    (mistake,) = said("experiment=clip_fc", "hooks.clip_fc.select=fcc")["mistakes"]
    assert mistake["where"] == "hooks.clip_fc.select"
    assert "fc" in mistake["what"]


def test_only_a_note_of_hookrun_is_a_note(said: Said, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "saying.py").write_text("def function(x):\n    print('NOTE: of a user')\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = '+hooks.own={select: fc, hook: forward, action: python, function: "saying:function"}'
    notes = said(*SMALL, own, "+trust=[saying]", "baseline=true")["notes"]
    assert any(note.startswith("baseline: true is for sweeps") for note in notes)
    assert "of a user" not in notes


@pytest.mark.parametrize("typed", ["--cfgg", "--json=short", "experiment", "--cfg=no"])
def test_a_wrong_word_is_one_mistake(typed: str, said: Said) -> None:
    (mistake,) = said(typed)["mistakes"]
    assert typed.partition("=")[0] in mistake["where"]


def test_an_unexpected_error_is_a_mistake_too(said: Said, monkeypatch) -> None:
    def broken(arguments: object, outcome: object) -> int:
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr("hookrun.command.cli.commands.execute", broken)
    found = said()
    assert (found["exit"], found["mistakes"][0]["what"]) == (1, "ZeroDivisionError: out of luck")


@pytest.mark.parametrize(
    ("seed", "code", "status"),
    [(1, 1, "failed"), (3, 3, "stopped"), (4, 3, "failed"), (130, 130, "interrupted")],
)
def test_a_run_that_ends_badly_names_its_directory(
    seed: int, code: int, status: str, said: Said, notes: object
) -> None:
    found = said("experiment=clip_fc", f"seed={seed}")
    assert (found["exit"], found["status"]) == (code, status)
    assert json.loads((Path(found["run"]) / "status.json").read_text())["status"] == status
    (mistake,) = found["mistakes"]
    assert mistake["what"]


def test_a_check_that_failed_is_told_as_on_stderr(said: Said, notes: object) -> None:
    assert said("experiment=clip_fc", "seed=4")["mistakes"][0]["what"] == "hook nan_hunt at conv1: found inf"


def test_a_damaged_run_is_still_one_object(said: Said) -> None:
    first = said(*SMALL)
    (Path(first["run"]) / "hooks.json").write_text("{")
    found = said(f"resume={first['run']}")
    assert any("hooks.json" in note for note in found["notes"])
    assert (found["run"], found["metrics"]) == (first["run"], first["metrics"])


# ---- sweeps --------------------------------------------------------------------------------------------------------


def test_a_sweep_says_how_each_job_ended(said: Said, notes: object) -> None:
    found = said("-m", "experiment=clip_fc", "seed=0,1,3")
    ended = [(job["job"], job["overrides"], job["status"]) for job in found["jobs"]]
    assert ended == [
        ("0", ["experiment=clip_fc", "seed=0"], "done"),
        ("1", ["experiment=clip_fc", "seed=1"], "failed"),
        ("2", ["experiment=clip_fc", "seed=3"], "stopped"),
    ]
    assert found["jobs"][1]["reason"] == "out of luck"
    assert [mistake["what"] for mistake in found["mistakes"]] == ["job 1: out of luck", "job 2: stopped"]
    assert all(Path(job["run"]).is_dir() for job in found["jobs"])


def test_the_answer_of_a_sweep_is_its_best_setting(said: Said) -> None:
    found = said("-m", *SMALL, "hooks.clip_fc.max=0.001,0.1", "baseline=true")
    values = {job["job"]: job["objective"] for job in found["jobs"]}
    best = max(("1", "2"), key=lambda job: values[job])
    answer = found["answer"]
    assert (answer["what"], answer["value"]) == ("best_setting", values[best])
    assert answer["without_hooks"] == values["0"]
    assert answer["ties"] == (values["1"] == values["2"])


def test_a_refused_sweep_names_key_and_job(said: Said) -> None:
    (mistake,) = said("-m", *SMALL, "hooks.clip_fc.max=0.1,-1")["mistakes"]
    assert mistake["where"] == "hooks.clip_fc"
    assert mistake["what"].startswith("job #1 ")


def test_a_sweep_of_plans_has_a_plan_for_each_job(said: Said) -> None:
    found = said("-m", "experiment=clip_fc", "hooks.clip_fc.select=fc,conv1", "task=plan")
    matches = [job["plan"]["hooks"][0]["matches"] for job in found["jobs"]]
    assert matches == [["fc.weight", "fc.bias"], ["conv1.weight", "conv1.bias"]]
    assert found["jobs"][1]["overrides"] == ["experiment=clip_fc", "hooks.clip_fc.select=conv1", "task=plan"]


# ---- the other commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [["--help"], ["--version"], ["--cfg", "job"], ["--hydra-help"]], ids=str)
def test_what_is_only_printed_is_a_text(typed: list[str], said: Said, capsys) -> None:
    assert main(typed) == 0
    printed = capsys.readouterr().out
    assert said(*typed)["text"] == printed != ""


def test_verify_says_which_file_is_bad(said: Said) -> None:
    run = said(*SMALL)["run"]
    whole = said(run, door=hookrun.verify.main)
    assert [found["bad"] for found in whole["verified"]] == [[]]
    (Path(run) / "metrics.jsonl").write_text("")
    found = said(run, door=hookrun.verify.main)
    assert found["exit"] == 1
    assert "metrics.jsonl" in found["verified"][0]["bad"][0]


@pytest.mark.parametrize("door", [hookrun.verify.main, hookrun.report.__main__.main, hookrun.runs.main])
def test_a_folder_that_is_missing_is_one_mistake(door: Callable[[list[str]], int], said: Said) -> None:
    found = said("nowhere", door=door)
    assert found["exit"] == 2
    assert "nowhere" in found["mistakes"][0]["what"]


def test_each_folder_that_is_missing_is_a_mistake(said: Said) -> None:
    for door in (hookrun.verify.main, hookrun.report.__main__.main):
        first, second = said("nowhere", "elsewhere", door=door)["mistakes"]
        assert ("nowhere" in first["what"], "elsewhere" in second["what"]) == (True, True)


def test_a_word_that_is_missing_is_told(said: Said) -> None:
    for door in (hookrun.verify.main, hookrun.compare.main):
        found = said(door=door)
        assert found["exit"] == 2
        assert found["mistakes"][0]["what"].startswith(("the following arguments are required", "usage: "))


def test_the_runs_of_a_folder_are_listed_as_data(said: Said) -> None:
    first, second = (said(*SMALL, f"seed={seed}", f"tags=[t{seed}]") for seed in (1, 2))
    rows = said("outputs", door=hookrun.runs.main)["runs"]
    assert [row["metrics"] for row in rows] == [second["metrics"], first["metrics"]]
    assert [row["tags"] for row in rows] == [["t2"], ["t1"]]


def test_a_comparison_answers_with_the_first_difference(said: Said) -> None:
    runs = [said(*SMALL, "task=predict", CAPTURE, f"seed={seed}")["run"] for seed in (1, 2)]
    found = said(*runs, "task.on_difference=stop", door=hookrun.compare.main)
    assert found["exit"] == 3
    assert found["answer"]["first"]["module"] == "fc"
    assert said(runs[0], runs[0], door=hookrun.compare.main)["answer"]["first"] is None


# ---- the schema ----------------------------------------------------------------------------------------------------


def test_the_schema_is_printed_by_a_command(capsys) -> None:
    assert hookrun.schema.main(["--output"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == output_schema()
    Draft202012Validator.check_schema(schema)


def test_a_key_that_the_schema_lacks_is_found(said: Said) -> None:
    said_by_commands = [
        said(*SMALL, CAPTURE),
        said(*SMALL, CAPTURE, "task=plan"),
        said("-m", *SMALL, "seed=1,2"),
        said("hooks.a=1"),
        said("task=modules"),
        said("--version"),
    ]
    keys = {key for found in said_by_commands for key in found}
    assert keys <= set(output_schema()["properties"])
    for key in keys:
        without = copy.deepcopy(output_schema())
        del without["properties"][key]
        assert any(not Draft202012Validator(without).is_valid(found) for found in said_by_commands)


# ---- the streams ---------------------------------------------------------------------------------------------------

NOISY = """
import ctypes, os, subprocess, sys

def function(x):
    print("from Python")
    sys.__stdout__.write("past sys.stdout\\n")
    ctypes.CDLL(None).printf(b"from C\\n")
    os.write(1, b"to the descriptor\\n")
    subprocess.run(["echo", "from a process"])
    return x
"""


def test_nothing_else_reaches_stdout(tmp_path: Path, cwd: Path) -> None:
    (tmp_path / "noisy_package.py").write_text(NOISY)
    own = '+hooks.own={select: fc, hook: forward, action: python, function: "noisy_package:function"}'
    command = [sys.executable, "-m", "hookrun", *SMALL, own, "+trust=[noisy_package]", "--json"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert json.loads(ended.stdout)["ok"], ended.stderr
    for printed in (
        "from Python",
        "past sys.stdout",
        "from C",
        "to the descriptor",
        "from a process",
        "epoch 1",
    ):
        assert printed in ended.stderr


def test_another_rank_prints_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["experiment=clip_fc", "task=plan", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_job_is_not_kept_with_its_model(said: Said) -> None:
    gc.collect()
    before = sum(isinstance(each, torch.nn.Module) for each in gc.get_objects())
    said("-m", "experiment=clip_fc", "seed=1,2,3", "task=plan")
    gc.collect()
    assert sum(isinstance(each, torch.nn.Module) for each in gc.get_objects()) <= before
