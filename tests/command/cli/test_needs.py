"""`needs`: its experiments run first, once, and their runs are reused; `previous`; the records about them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.testing import assert_close

import hookrun
from hookrun.cli import main
from hookrun.report.sweep_facts import read_sweep
from hookrun.store.reader import Run

CLEAN = """
# @package _global_
defaults: [override /task: predict, override /model: mlp]
compute: {device: cpu, threads: 1}
train: {limit_batches: 1}
hooks:
  seen: {select: [layers.1, fc], hook: forward, action: capture}
"""
LINE = "needs: clean = experiment clean seed=0 → outputs/needs/"
Call = Callable[..., tuple[int, str]]


pytestmark = pytest.mark.usefixtures("no_pages")


@pytest.fixture
def call(conf: Callable[..., str], capsys: Any) -> Call:
    """Run a command line with the experiments `clean` and `patch`; returns its exit code and its output."""
    folder = conf(**{"experiment/clean": CLEAN, "experiment/patch": PATCH})

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["--config-dir", folder, *arguments])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err, printed.err
        return code, printed.out + printed.err

    return call


@pytest.fixture(scope="module")
def patched_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which `experiment=patch` has been run, and what was printed."""
    folder = tmp_path_factory.mktemp("patched")
    for name, text in (("clean", CLEAN), ("patch", PATCH)):
        (folder / "conf/experiment").mkdir(parents=True, exist_ok=True)
        (folder / f"conf/experiment/{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.chdir(folder)
        assert main(["--config-dir", "conf", "experiment=patch"]) == 0
    return folder, said.getvalue()


@pytest.fixture
def patched(patched_once: tuple[Path, str], cwd: Path) -> Path:
    """The run of the need `clean`, in a copy of the outputs of `experiment=patch`."""
    shutil.copytree(patched_once[0] / "outputs", cwd / "outputs", symlinks=True)
    (clean,) = made(cwd)
    return clean


def test_a_plan_shows_it_without_running_it(call: Call, cwd: Path) -> None:
    code, said = call("experiment=patch", "task=plan")
    assert code == 0
    assert list(cwd.iterdir()) == []
    assert LINE in said
    assert "(runs first)" in said
    assert "patch.value: a value not known yet" in said
    assert "seen: captures 296 B per sample" in said, "the plan of both"
    _, said = call("experiment=patch", "task=plan", "model.weights={run: clean}")
    assert "\nweights: those of clean, which runs first\n" in said
    code, said = call("-m", "experiment=patch", "seed=1,2", "task=plan")
    assert code == 0
    assert said.count("(runs first)") == 2, "each seed has its clean run"


def test_a_need_runs_first_then_is_reused(patched: Path, patched_once: tuple[Path, str], call: Call) -> None:
    folder, said = patched_once
    assert "(runs first)" in said
    found = hookrun.open_run("outputs/latest")
    theirs = hookrun.open_run(patched)
    assert_close(found.predictions[:], theirs.predictions[:])
    assert found.config["hooks"]["patch"]["value"]["run"] == "clean", "by its name"
    assert found.plan["runs"] == [
        {
            "where": "hooks.patch.value.run", "run": "clean", "path": str(made(folder)[0]), "need": True,
            "plan": theirs.plan["hash"], "manifest": theirs.status["manifest"],
        }
    ]  # fmt: skip
    for more in ((), ("task=plan",)):
        code, said = call("experiment=patch", *more)
        assert code == 0
        assert f"{LINE}{patched.parent.name}/{patched.name} (used again)" in said


def test_tasks_that_read_runs_may_need_them(call: Call, cwd: Path, conf: Callable[..., str]) -> None:
    needs = "needs:\n  a: {experiment: clean}\n  b: {experiment: clean, overrides: [seed=1]}\n"
    conf(**{"experiment/two": f"# @package _global_\n{needs}"})
    code, said = call("experiment=two", "task=compare", "task.run=a", "task.other=outputs/nowhere")
    assert (code, made(cwd)) == (2, []), "what is missing is told before the needs are run"
    assert "task.other: there is no " in said
    assert call("experiment=two", "task=compare", "task.run=a", "task.other=b")[0] == 0
    a, b = map(hookrun.open_run, sorted(made(cwd), key=lambda run: hookrun.open_run(run).config["seed"]))
    compared = json.loads((cwd / "outputs/latest/compare.json").read_text())
    assert compared["first"] == a.compare(b).first
    assert compared["first"]["module"] == "layers.1"
    code, said = call("experiment=two", "task=similarity", "task.run=a")
    assert code == 0, said
    assert f"similarity of {a.path}" in said


def test_an_incomplete_run_is_not_reused(patched: Path, call: Call, cwd: Path) -> None:
    clean = patched
    status = json.loads((clean / "status.json").read_text())
    for change in ("killed", "failed", "changed", "removed"):
        copied = cwd / "copy"
        shutil.copytree(clean, copied)
        if change == "changed":
            shard = next((clean / "captures").glob("*.safetensors"))
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
        elif change == "removed":
            (clean / "metrics.jsonl").unlink()
        else:
            state = {"killed": "running", "failed": "failed"}[change]
            (clean / "status.json").write_text(json.dumps({**status, "status": state, "manifest": None}))
        code, said = call("experiment=patch", "task=plan")
        assert code == 0, change
        assert "(runs first)" in said, change
        shutil.rmtree(clean)
        copied.rename(clean)
    assert "(used again)" in call("experiment=patch", "task=plan")[1]


def test_files_that_the_configuration_names_are_part_of_the_hash(call, cwd, conf) -> None:
    from safetensors.torch import save_file

    shift = "shift: {select: layers.1, hook: forward, action: add_bias, value: {file: v.safetensors}}\n"
    conf(**{"experiment/clean": f"{CLEAN}  {shift}"})
    folders = []
    for number in (1, 1, 2):
        save_file({"v": torch.full((64,), float(number))}, cwd / "v.safetensors")
        code, printed = call("experiment=patch", "task=plan")
        assert code == 0
        assert "(runs first)" in printed
        folders.append(printed.partition("outputs/needs/")[2].partition(" ")[0])
    assert folders[0] == folders[1] != folders[2], "the same bytes once, other bytes anew"


def test_a_sweep_runs_it_once_before_its_jobs(notes, call: Call, cwd: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "hookrun.command.sweeps.jobs.keep_found_runs", lambda *_: None
    )  # it reads what is really prepared
    code, said = call("-m", "experiment=patch", "hooks.corrupt.std=1,2")
    (clean,) = made(cwd)
    sweep = (cwd / "multirun/latest").resolve()
    assert code == 0
    assert [run_dir for _, run_dir in notes.ran] == [clean, sweep / "0", sweep / "1"]
    assert said.index("(runs first)") < said.index("Launching 2 jobs")
    assert [job.runs["clean"] for job, _ in notes.prepared[-2:]] == [str(clean)] * 2
    code, said = call("-m", "experiment=patch", "seed=1,2", "hooks.patch.select=layers.9")
    assert code == 2
    assert made(cwd) == [clean], "refused before anything runs"


def test_errors_of_a_need_are_reported_with_its_key_path(call, cwd, conf) -> None:
    conf(**{"experiment/clean": CLEAN + "  bad: {select: layers.9, hook: forward, action: print}\n"})
    code, said = call("experiment=patch")
    assert code == 2
    assert not (cwd / "outputs").exists(), "refused before anything runs"
    assert "needs.clean (experiment clean seed=0): hooks.bad.select: 'layers.9' matches no module" in said
    conf(**{"experiment/clean": CLEAN})
    code, said = call("experiment=patch", "hooks.patch.select=layers.7")
    assert code == 2
    assert "(runs first)" not in said, "its own mistakes come before what it needs is run"


@pytest.mark.parametrize(("seed", "reason"), [(4, ": found inf"), (3, "")], ids=["failed", "stopped"])
def test_a_need_that_fails_ends_the_command(seed: int, reason: str, notes, call: Call, cwd: Path) -> None:
    code, said = call("experiment=patch", f"seed={seed}")
    ended = f"needs.clean: experiment clean seed={seed} ended with exit code 3{reason}\n"
    assert code == 3
    assert f"{ended}    its run directory: {made(cwd)[0]}" in said
    assert not list(cwd.glob("outputs/*/status.json")), "the experiment itself has not begun"


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ("{clean: {experiment: claen}}", "needs.clean.experiment: there is no experiment 'claen'"),
        ("{clean: {experiment: ../clean}}", "needs.clean.experiment: found '../clean', expected the name"),
        ("{clean: {experiment: patch}}", "which is not among the needs"),
        ("{clean: {experiment: clean_sweep}}", "hydra.mode: is a sweep, and a need is one run"),
        ("{clean: {experiment: clean, overides: []}}", "needs.clean.overides: unknown key"),
        ("{clean: {experiment: clean, overrides: ['seed=1,2']}}", "seed: '1,2' stands for several values"),
        ("{clean: {experiment: clean, overrides: ['sed=1']}}", "'sed': is not a key that a file may set"),
        ("{clean: {experiment: clean, overrides: ['trust=[os]']}}", "is taken from the command line only"),
        ("{clean: {experiment: clean, overrides: ['+trust=[os]']}}", "is taken from the command line only"),
        ("{clean: {experiment: clean, overrides: ['hydra.run.dir=/x']}}", "is not a key that a file"),
        ("{clean: {experiment: clean, overrides: ['hydra/launcher=joblib']}}", "is not a key that a file"),
        ("{clean: {experiment: clean, overrides: ['++hydra.job.env_set.A=1']}}", "is not a key that a file"),
        ("{clean: {experiment: clean, overrides: ['experiment=patch']}}", "names another experiment"),
        ("{clean: {experiment: clean, overrides: ['--config-dir=/']}}", "is not a key that a file may set"),
        ("{clean: {experiment: clean, overrides: ['task=plan']}}", "task=plan does not make a run directory"),
        ('{clean: {experiment: clean, overrides: ["seed=${oc.env:HOME}"]}}', "`oc.env` is refused"),
        ("{previous: {experiment: clean}}", "previous is the run before"),
        ("{a/b: {experiment: clean}}", "expected a letter"),
        ("[clean]", "needs: found"),
    ],
)
def test_forbidden_needs_are_refused(call, cwd, conf, needs: str, said: str) -> None:
    before = set(cwd.rglob("*"))
    sweep = CLEAN + "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n"
    text = PATCH.replace('{experiment: clean, overrides: ["seed=${seed}"]}', needs[len("{clean: ") : -1])
    if not needs.startswith("{clean"):
        text = PATCH.replace('\n  clean: {experiment: clean, overrides: ["seed=${seed}"]}', f" {needs}")
    conf(**{"experiment/patch": text, "experiment/clean_sweep": sweep})
    code, found = call("experiment=patch")
    assert code == 2, found
    assert said in found, found
    assert set(cwd.rglob("*")) == before


def test_a_resumed_run_finds_its_needs_in_folders_typed_again(patched, call, monkeypatch, capsys) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the machine is gone")

    whole = hookrun.open_run("outputs/latest")
    with monkeypatch.context() as broken:
        broken.setattr("hookrun.run.tasks.predict.PredictTask.perform", fails)
        assert call("experiment=patch", "hydra.run.dir=one")[0] == 1
    assert main(["resume=one"]) == 2
    assert "type --config-dir again" in capsys.readouterr().err
    code, said = call("resume=one")
    assert code == 0, said
    assert "used again" in said, said
    assert Path("one/samples.jsonl").read_bytes() == (whole.path / "samples.jsonl").read_bytes()


def test_a_need_uses_only_runs_that_are_named_before_it(call, cwd, conf) -> None:
    after = "  after: {select: layers.1, hook: forward, action: capture, priority: 1}\n"
    twice = PATCH.replace("experiment: clean", "experiment: patch").replace("capture: seen", "capture: after")
    first = '  first: {experiment: clean, overrides: ["seed=${seed}"]}\n'
    named = twice.replace("needs:\n", f"needs:\n{first}")
    late = twice.replace("hooks:\n", f"{first}hooks:\n")
    conf(**{"experiment/patch": PATCH + after, "experiment/named": named})
    conf(**{"experiment/unnamed": twice, "experiment/late": late})
    for wrong in ("unnamed", "late"):
        code, said = call(f"experiment={wrong}")
        assert code == 2
        assert "needs.clean (experiment patch seed=0): needs.clean: is experiment clean" in said
        assert "run it first and name its directory" in said
    assert list(cwd.iterdir()) == [], "refused before anything runs"
    code, said = call("experiment=named", "task=plan")
    assert code == 0, said
    assert said.count("(runs first)") == 2, said
    assert said.index("needs: first = experiment clean") < said.index("needs: clean = experiment patch")


def test_a_name_that_is_not_a_need_is_refused(call: Call) -> None:
    code, said = call("experiment=patch", "hooks.patch.value.run=claen")
    assert code == 2
    assert "among the needs: did you mean 'clean'?" in said


def test_previous_is_the_newest_finished_run(patched_once: tuple[Path, str], call: Call, cwd: Path) -> None:
    value = "hooks.patch.value.run=previous"
    code, said = call("experiment=patch", "~needs", value)
    assert code == 2
    assert "hooks.patch.value.run: there is no finished run in" in said
    shutil.copytree(patched_once[0] / "outputs", cwd / "outputs", symlinks=True)
    assert call("experiment=clean", "seed=4")[0] == 0
    expected = hookrun.open_run("outputs/latest")
    assert call("experiment=clean", "hooks.seen.select=layers.9")[0] == 2
    assert call("experiment=patch", "~needs", value, "seed=4")[0] == 0
    found = hookrun.open_run("outputs/latest")
    assert found.plan["runs"][0]["path"] == str(expected.path)
    assert_close(found.predictions[:], expected.predictions[:])
    code, said = call("-m", "experiment=patch", "~needs", value, "seed=4")
    assert code == 2
    assert f"no hook 'seen' in the captures of {found.path}" in said, "the run before the sweep"


def again(run: Run) -> list[str]:
    """The command's arguments in the section `repeat` of the page."""
    from hookrun.report.facts import read_facts
    from hookrun.report.sections.repeat import of_a_run

    words = shlex.split(of_a_run(read_facts(run.path))["command"])
    assert words[:3] == ["python", "-m", "hookrun"]
    return words[3:]


def test_the_repeat_command_names_the_same_run(patched: Path, call: Call) -> None:
    """`outputs/latest` is the run itself by that time."""
    clean = hookrun.open_run(patched)
    runs = {
        "task.run": ["task=similarity", "task.run=outputs/latest"],
        "hooks.patch.value.run": ["experiment=patch", "hooks.patch.value.run=outputs/latest"],
    }
    for where, overrides in runs.items():
        os.unlink("outputs/latest")
        os.symlink(clean.path, "outputs/latest")
        assert call(*overrides)[0] == 0, where
        first = hookrun.open_run("outputs/latest")
        (used,) = [*first.plan.get("runs", []), *first.env.get("runs", [])]
        assert used["where"] == where
        assert used["path"] == str(clean.path)
        assert used["manifest"] == clean.status["manifest"]
        node: Any = yaml.safe_load((first.path / ".hydra/config.yaml").read_text())
        for key in where.split("."):
            node = node[key]
        assert node == str(clean.path), "the stored configuration means the same run too"
        command = again(first)
        assert f"{where}={clean.path}" in command
        assert f"{where}=outputs/latest" not in command
    assert main(command) == 0
    second = hookrun.open_run("outputs/latest")
    assert second.path != first.path
    assert second.metrics == first.metrics


def test_one_key_of_vars_changes_several_settings(notes, call: Call, cwd: Path, conf) -> None:
    hooks = "  a: {select: layers.1, hook: forward, action: scale, factor: '${vars.strength}'}\n"
    hooks += "  b: {select: layers.3, hook: forward, action: add_bias, value: '${vars.strength}'}\n"
    conf(**{"experiment/both": f"{CLEAN}{hooks}vars: {{strength: 2, unused: {{a: [1]}}}}\n"})
    assert call("-m", "experiment=both", "vars.strength=1,3")[0] == 0
    for (experiment, _), strength in zip(notes.prepared, (1, 3), strict=True):
        scale, shift = (hook.action for hook in experiment.hooks.hooks[1:])
        assert scale.factor == strength
        assert shift.value == strength
    assert read_sweep((cwd / "multirun/latest").resolve()).varied == ["vars.strength"]
    code, said = call("experiment=both", "vars.strenth=3")
    assert code == 2
    assert "did you mean 'vars.strength'" in said
    for bad, why in {
        "vars: {x: {_target_: os.system}}": "would run code",
        "vars: [1]": "vars: found",
        "vars: {a: '${oc.env:HOME}'}": "`oc.env` is refused",
    }.items():
        conf(**{"experiment/bad": f"{CLEAN}{bad}\n"})
        code, said = call("experiment=bad")
        assert code == 2, said
        assert why in said, said


def test_another_mistake_does_not_hide_the_needs(call: Call, cwd: Path) -> None:
    weights = "+model.weights={run: clean}"
    against = "task.metrics=[{name: kl, against: {run: clean}}]"
    for typed in (
        ("hooks.patch.indx=1",),
        ("hooks.patch.action=replce", weights),
        ("hooks.patch.action=replce", "task=evaluate", against),
        ("hooks.patch.action=replce", "hooks.patch.value.run=previous"),
        ("+needs.clean.overides=[]",),
    ):
        code, said = call("experiment=patch", *typed)
        assert code == 2, said
        assert "1 configuration error\n" in said, said
    code, said = call("experiment=patch", weights, "hooks.patch.select=nowhere", "hooks.corrupt.select=nope")
    assert code == 2
    assert "'nope' matches no module" in said
    assert "'nowhere' matches no module" in said


PATCH = """
# @package _global_
defaults: [override /task: predict, override /model: mlp]
compute: {device: cpu, threads: 1}
train: {limit_batches: 1}
needs:
  clean: {experiment: clean, overrides: ["seed=${seed}"]}
hooks:
  corrupt: {select: layers.0, hook: forward, action: noise, std: 3}
  patch: {select: layers.1, hook: forward, action: replace, value: {run: clean, capture: seen, sample: same}}
"""


def made(cwd: Path) -> list[Path]:
    return sorted(status.parent for status in cwd.glob("outputs/needs/*/*/status.json"))
