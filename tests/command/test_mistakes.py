"""What a program reads of a mistake: its place, what was found, what is near, and a fix that is applied blindly."""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from golden import GOLDEN, blocks, lines, mistakes, parts

from hookrun.command.mistakes import mistakes_of
from hookrun.errors import CheckFailed, Fix, Problem, SpecError, misnamed, slip_of

Mistake = dict[str, Any]

TOLD = (GOLDEN / "mistakes.jsonl").read_text(encoding="utf-8").splitlines()
OF_GOLDEN: list[Mistake] = [json.loads(line) for line in TOLD]
FIXED = [mistake for mistake in OF_GOLDEN if mistake["fix"] is not None]


@pytest.mark.parametrize("name", ["command_line", "file", "model"])
def test_each_golden_mistake_reads_as_this_data(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    told = [line for line in TOLD if line.startswith(f'{{"in": "{path.name} ')]
    assert list(lines(path)) == told, "if the new data is right, run scripts/reference"


def test_every_mistake_has_a_place_and_many_a_fix() -> None:
    assert len(OF_GOLDEN) >= 40
    assert all(mistake["where"] for mistake in OF_GOLDEN)
    assert len(FIXED) >= 40


@pytest.mark.parametrize("mistake", FIXED, ids=[f"{each['in']} at {each['where']}" for each in FIXED])
def test_a_fix_applied_blindly_leaves_no_such_mistake(mistake: Mistake) -> None:
    transcript, number = mistake["in"].partition(":")[0].split()
    file, typed = parts(blocks(GOLDEN / transcript)[int(number) - 1])
    before = {(each["where"], each["what"]) for each in mistakes(file, shlex.split(typed))}
    assert any(mistake["where"] == where for where, _ in before)
    file, words = applied(mistake, file, shlex.split(typed))
    if not {"task=plan", "--cfg"} & set(words):
        words.append("task=plan")
    after = mistakes(file, words)
    same = [
        each
        for each in after
        if each["where"] == mistake["where"] and (each["where"], each["what"]) in before
    ]
    assert same == []


def applied(mistake: Mistake, file: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The file and the words without what stands at `where`, and with the key and the value of the fix."""
    where, fix = mistake["where"], mistake["fix"]
    content = yaml.safe_load(file) if file else {}
    if taken(content, where.split(".")):
        if "value" in fix:
            put(content, fix["key"].split("."), fix["value"])
        else:
            taken(content, fix["key"].split("."))
        return f"# @package _global_\n{yaml.safe_dump(content)}", list(words)
    left = without(where, words)
    if fix["key"].startswith("-"):
        given = [] if fix["value"] is True else [str(fix["value"])]
        return file, [fix["key"], *given, *left]
    if "value" not in fix:
        return file, [*left, f"~{fix['key']}"]
    return file, [*left, f"{fix['key']}={written(fix['value'])}"]


def without(where: str, words: Sequence[str]) -> list[str]:
    """The words without those at `where`: the words themselves, a flag and its value, or the override of a key."""
    count = where.count(" ") + 1
    for place in range(len(words)):
        if " ".join(words[place : place + count]) == where:
            takes_value = where in ("--config-name", "--cfg")
            return [*words[:place], *words[place + count + takes_value :]]
    return [word for word in words if word.partition("=")[0].lstrip("+~") != where]


def written(value: Any) -> str:
    """A value as Hydra reads it in an override."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return json.dumps(value)


def taken(section: Any, path: Sequence[str]) -> bool:
    """Whether the key path was in the section, from which it is taken away."""
    *above, last = path
    for key in above:
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        return False
    del section[last]
    return True


def put(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for key in above:
        section = section.setdefault(key, {})
    section[last] = value


@pytest.mark.parametrize(
    ("typed", "options", "meant"),
    [
        ("fcc", ["fc", "conv1"], "fc"),
        ("forwad", ["forward", "forward_pre", "grad"], "forward"),
        ("Adma", ["Adam", "Adamax", "AdamW", "RAdam"], "Adam"),
        ("sgd", ["SGD", "ASGD"], "SGD"),
        ("clip-fc", ["clip_fc", "clip_fs"], "clip_fc"),
        ("--multi-run", ["--multirun", "--run"], "--multirun"),
        ("mx", ["max", "min"], "max"),
        ("mix", ["max", "min"], None),
        ("layer5", ["layer4"], None),
        ("conv1_1", ["conv11"], None),
        ("q_proj", ["o_proj"], None),
        ("wte", ["wpe"], None),
        ("relu", ["gelu"], None),
        ("encoder", ["decoder"], None),
        ("<script>", ["script"], None),
        ("", ["a"], None),
    ],
)
def test_only_one_slip_of_the_fingers_is_corrected(typed: str, options: list[str], meant: str | None) -> None:
    assert slip_of(typed, options) == meant


def test_the_fix_of_a_problem_is_not_part_of_its_words() -> None:
    plain = Problem("hooks.a.hook", "found 'forwad'", "did you mean 'forward'?")
    full = misnamed("hooks.a.hook", "found 'forwad'", "forwad", ["forward"])
    assert str(full) == str(plain)
    assert repr(full) == repr(plain)
    assert {full: 1}[plain] == 1


def test_the_errors_of_a_job_bring_their_fixes_along() -> None:
    problems = [
        misnamed("a.b", "no", "forwad", ["forward"]),
        Problem("c", "no", fix=Fix("c", takes_away=True)),
    ]
    error = SpecError(problems, ["a note"])
    again = pickle.loads(pickle.dumps(error))
    assert mistakes_of(again) == mistakes_of(error)
    assert [each["fix"] for each in mistakes_of(again)] == [{"key": "a.b", "value": "forward"}, {"key": "c"}]


def test_what_is_not_of_json_is_described_as_text() -> None:
    found = mistakes_of(SpecError([Problem("a", "no", found=float("nan"), fix=Fix("a", {1, 2}))]))
    assert found == [{"where": "a", "what": "no", "found": "nan", "near": [], "fix": None}]
    long = mistakes_of(SpecError([misnamed("a", "no", "x" * 20_000, ["y"])]))
    assert len(json.dumps(long)) < 1_000


def test_another_error_is_one_mistake_without_a_place() -> None:
    assert mistakes_of(CheckFailed("hooks.a: fc is 3")) == [
        {"where": None, "what": "hooks.a: fc is 3", "found": None, "near": [], "fix": None}
    ]
    assert mistakes_of(ZeroDivisionError("x"))[0]["what"] == "ZeroDivisionError: x"


def test_a_swept_key_is_not_replaced_by_one_value() -> None:
    words = ["-m", "task=plan", "+hooks.a={select: fc, hook: grad, action: clamp, max: 1}"]
    swept = mistakes("", [*words, "hooks.a.select=fc,fcc"])
    assert [(each["where"], each["near"], each["fix"]) for each in swept] == [
        ("hooks.a.select", ["fc"], None)
    ]
    same = mistakes("", [*words, "hooks.a.select=fcc", "seed=1,2"])
    assert [each["fix"] for each in same] == [{"key": "hooks.a.select", "value": "fc"}]


HOOK = "# @package _global_\nhooks: {a: {select: fc, hook: forward, action: scale, factor: 2}}\n"


@pytest.mark.parametrize(
    ("file", "typed"),
    [
        ("", "experiment=clip_fc train.epoch=3 train.epochs=2"),
        ("", "experiment=clip_fc hooks.nope.max=1"),
        ("", "experiment=clip_fc hooks.clip_fc.select=[conv1,h[-1]]"),
        ("", "--epochs=3 train.epochs=2"),
        ("train: {epoch: 3, epochs: 2}", ""),
        ("train: {lr: 0.1, optimizer: {lr: 0.2}}", ""),
        ("hook: {}", ""),
    ],
)
def test_no_fix_changes_what_was_meant_elsewhere(file: str, typed: str) -> None:
    words = ["--config-dir", "my_conf", "experiment=mine", "task=plan"] if file else shlex.split(typed)
    (mistake,) = mistakes(HOOK + file if file else "", words)
    assert mistake["fix"] is None


def test_a_key_that_only_the_defaults_set_has_a_fix() -> None:
    words = ["--config-dir", "my_conf", "experiment=mine", "task=plan"]
    (mistake,) = mistakes(f"{HOOK}train: {{lr: 0.1}}", words)
    assert mistake["fix"] == {"key": "train.optimizer.lr", "value": 0.1}
