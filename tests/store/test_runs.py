"""What a run did, in a few words, and the runs of a folder as a sequence."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
from made_runs import CLAMP, change, made_run

import hookrun
from hookrun.errors import Fix
from hookrun.store.runs import Runs
from hookrun.store.summary import MOST_HEADLINE, headline, summary_of

METRICS = [
    {"split": "train", "step": 0, "of": "batch", "loss": 9.0, "lr": 0.1},
    {"split": "train", "epoch": 0, "step": 4, "of": "epoch", "loss": 0.5},
    {"split": "val", "epoch": 0, "step": 4, "of": "epoch", "loss": 0.4, "accuracy": 0.7},
    {"split": "val", "epoch": 1, "step": 8, "of": "epoch", "loss": 0.3, "accuracy": 0.8},
]
DIVERGED = [{"split": "val", "epoch": 0, "step": 4, "of": "epoch", "loss": math.nan}]
HOSTILE = "<script>\x1b[31m\n" + "x" * 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs in `outputs`, one of them of a sweep, and the link to the last one."""
    outputs = tmp_path / "outputs"
    typed = ("experiment=clip_fc", "hooks.clip_fc.max=0.01", "seed=1")
    made_run(outputs / "b", *typed, started="2026-05-01T00:00:00+00:00", metrics=METRICS, tags=["paper"])
    made_run(outputs / "a", "experiment=other", "seed=10", started="2026-05-02T00:00:00+00:00", note="a try")
    typed = ("seed=9", "train.shuffle=true")
    made_run(outputs / "c", *typed, started="2026-05-03T00:00:00+00:00", status="failed", metrics=DIVERGED)
    made_run(outputs / "sweeps/x/0", "seed=2", started="2026-05-04T00:00:00+00:00", hooks=[])
    (outputs / "latest").symlink_to("c")
    return outputs


def names(found: Runs) -> list[str]:
    return [summary.name for summary in found.summaries]


def test_a_summary_says_what_the_run_did(tmp_path: Path) -> None:
    typed = ("experiment=clip_fc", "hooks.clip_fc.max=0.001", "tags=[a]")
    path = made_run(tmp_path / "run", *typed, metrics=METRICS, tags=["a", "b"], note="one try")
    found = summary_of(path)
    assert (found.name, found.status, found.experiment, found.task, found.model) == (
        "run", "done", "clip_fc", "train", "cnn"
    )  # fmt: skip
    (hook,) = found.hooks
    assert (hook.name, hook.hook, hook.action, hook.sites) == (
        "clip_fc", "grad", "clamp", ("fc.weight", "fc.bias")
    )  # fmt: skip
    assert (found.overrides, found.tags, found.note) == (typed, ("a", "b"), "one try")
    assert found.metrics == {"train/loss": 0.5, "val/loss": 0.3, "val/accuracy": 0.8}
    assert found.damaged == ""
    assert headline(found) == "clip_fc · cnn · grad clamp fc.weight, fc.bias · hooks.clip_fc.max=0.001"


def test_a_model_from_python_is_named_by_its_class(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", model={"name": "given"})
    assert summary_of(path).model == "CNN"
    assert headline(summary_of(path)).startswith("train · CNN · grad clamp")


def test_a_run_of_an_earlier_version_has_its_summary(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", "experiment=clip_fc", metrics=METRICS, tags=["a"], note="b")
    kept = summary_of(path)
    change(path, summary=None)
    assert summary_of(path) == kept
    change(path, summary={"hooks": "not a list"})
    assert summary_of(path) == kept, "what is not valid is read again"


def test_a_disk_that_fails_costs_no_last_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> dict[str, float]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hookrun.store.description.last_metrics", fail)
    path = made_run(tmp_path / "run", "experiment=clip_fc", metrics=METRICS)
    assert summary_of(path).status == "done"
    assert summary_of(path).experiment == "clip_fc"


def test_a_kept_summary_needs_no_other_file(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", "experiment=clip_fc", metrics=METRICS)
    kept = summary_of(path)
    for name in (".hydra", "plan.json", "metrics.jsonl"):
        shutil.rmtree(path / name) if name == ".hydra" else (path / name).unlink()
    assert summary_of(path) == kept


def test_a_running_run_has_its_last_metrics(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", "experiment=clip_fc", metrics=METRICS[:2], status="running")
    found = summary_of(path)
    assert (found.status, found.ended, found.metrics) == ("running", "", {"train/loss": 0.5})
    assert found.duration is not None
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "of": "epoch", "loss": 0.1}\n{"split": "val", "los')
    assert summary_of(path).metrics == {"train/loss": 0.5, "val/loss": 0.1}


def test_of_many_metrics_the_last_ones_are_read(tmp_path: Path) -> None:
    batches = [{"split": "train", "step": step, "of": "batch", "loss": float(step)} for step in range(8000)]
    path = made_run(tmp_path / "run", metrics=[*METRICS, *batches])
    assert (path / "metrics.jsonl").stat().st_size > 2**18
    assert summary_of(path).metrics["train/loss"] == 7999


def test_a_killed_run_is_listed_as_cut_off(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", status="running")
    change(path, pid=2**31 - 1)
    found = summary_of(path)
    assert (found.status, found.duration) == ("cut off", None)
    assert "2147483647" in found.reason


def test_a_long_reason_is_one_short_line(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run")
    change(path, status="failed", reason="first\nsecond\n" * 9_000)
    found = summary_of(path)
    assert len(found.reason) < 2_000
    assert found.reason.isprintable()


@pytest.mark.parametrize(
    ("file", "text", "status"),
    [
        ("status.json", "[half", "damaged"),
        ("status.json", '{"status": 3}', "damaged"),
        (".hydra/config.yaml", "a: [half", "running"),
        (".hydra/overrides.yaml", "&a [*a]", "running"),
        ("plan.json", '{"hooks": 5}', "running"),
    ],
)
def test_a_damaged_run_says_what_is_wrong(tmp_path: Path, file: str, text: str, status: str) -> None:
    path = made_run(tmp_path / "outputs/run", "seed=1", status="running")
    (path / file).write_text(text)
    (found,) = hookrun.runs(tmp_path / "outputs").summaries
    assert found.status == status
    assert str(path / file) in found.damaged


def test_a_link_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", status="running")
    secret = tmp_path / "secret"
    secret.write_text('{"status": "done", "reason": "secret"}')
    (path / "status.json").unlink()
    (path / "status.json").symlink_to(secret)
    found = summary_of(path)
    assert found.status == "damaged"
    assert "secret" not in found.reason


def test_a_run_that_has_not_begun_is_listed(tmp_path: Path) -> None:
    (tmp_path / "sweep/3/.hydra").mkdir(parents=True)
    (found,) = hookrun.runs(tmp_path).summaries
    assert (found.name, found.status, found.damaged) == ("sweep/3", "not started", "")


def test_hostile_names_are_bounded_and_printable(tmp_path: Path) -> None:
    hook = {
        "name": HOSTILE[:900],
        "hook": HOSTILE[:900],
        "action": HOSTILE[:900],
        "targets": [{"path": HOSTILE[:900]}] * 60,
    }
    many = [f"k{number}={HOSTILE[:2000]}" for number in range(300)]
    config: dict[str, Any] = {
        "task": {"name": HOSTILE},
        "model": {"name": HOSTILE},
        "tags": [HOSTILE] * 300,
        "note": HOSTILE,
    }
    path = made_run(tmp_path / "run", *many, hooks=[hook] * 60, metrics=[{HOSTILE[:500]: 1.0}], **config)
    assert (path / "status.json").stat().st_size < 100_000
    found = summary_of(path)
    assert (found.hook_count, found.hooks[0].count, found.override_count) == (60, 60, 300)
    line = headline(found)
    assert len(line) <= MOST_HEADLINE
    assert line.isprintable()


def test_many_hooks_and_sites_are_counted(tmp_path: Path) -> None:
    sites = [{"path": f"layers.{number}"} for number in range(62)]
    hooks = [{**CLAMP, "name": f"h{number}", "targets": sites} for number in range(9)]
    found = summary_of(made_run(tmp_path / "run", hooks=hooks))
    assert str(found.hooks[0]) == "h0: grad clamp layers.0, layers.1 and 60 more"
    assert headline(found).count("layers.1 and 60 more") == 4
    assert headline(found).endswith(" and 5 more")


def test_a_run_without_its_hooks_names_none(tmp_path: Path) -> None:
    assert (
        headline(summary_of(made_run(tmp_path / "run", "hooked=false", hooked=False)))
        == "train · cnn · hooked=false"
    )


def test_an_analysis_names_the_run_that_it_is_of(tmp_path: Path) -> None:
    task = {"name": "probe", "run": "/somewhere/outputs/mine"}
    assert headline(summary_of(made_run(tmp_path / "run", hooks=[], task=task))) == "probe · of mine"


def test_a_run_in_a_loop_of_ones_own_has_a_headline(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run")
    shutil.rmtree(path / ".hydra")
    change(path, summary=None)
    assert headline(summary_of(path)) == "run · CNN · grad clamp fc.weight, fc.bias"


# ---- the runs of a folder


def test_the_runs_of_a_folder_are_the_newest_first(folder: Path) -> None:
    found = hookrun.runs(folder)
    assert names(found) == ["sweeps/x/0", "c", "a", "b"], "the link `latest` is not another run"
    assert (len(found), found[0].path) == (4, folder / "sweeps/x/0")
    assert [run.status["status"] for run in found] == ["done", "failed", "done", "done"]
    assert names(found[1:3]) == ["c", "a"]
    assert repr(found) == f"<4 runs of {folder}: 3 done, 1 failed>"


def test_nothing_is_written_into_the_folder(folder: Path) -> None:
    def content() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}

    before = content()
    hookrun.runs(folder).table()
    assert content() == before


def test_a_run_directory_is_its_only_run(folder: Path) -> None:
    assert names(hookrun.runs(folder / "latest")) == ["c"]
    assert names(hookrun.runs(folder / "sweeps/x")) == ["0"]


def test_folders_inside_a_run_are_not_searched(folder: Path) -> None:
    shutil.copytree(folder / "a", folder / "c/captures/a")
    shutil.copytree(folder / "a", folder / ".trash/a")
    assert len(hookrun.runs(folder)) == 4


def test_the_default_folder_is_that_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert len(hookrun.runs()) == 4
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(folder.parent))
    assert len(hookrun.runs()) == 4


def test_a_missing_folder_names_the_nearest(folder: Path) -> None:
    with pytest.raises(hookrun.HookrunError, match="did you mean 'outputs'"):
        hookrun.runs(folder.parent / "outptus")
    with pytest.raises(hookrun.HookrunError, match="is not a folder of runs"):
        hookrun.runs(folder / "a/status.json")
    assert len(hookrun.runs(folder / "a/.hydra")) == 0


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"status": "failed"}, ["c"]),
        ({"status": "stopped"}, []),
        ({"experiment": "clip_fc", "status": "done"}, ["b"]),
        ({"tags": "paper"}, ["b"]),
        ({"note": "a*"}, ["a"]),
        ({"status": ["failed", "stopped"]}, ["c"]),
        ({"experiment": ("other", "clip*")}, ["a", "b"]),
        ({"hooks": "clamp"}, ["c", "a", "b"]),
        ({"hooks": "clip_fc"}, ["c", "a", "b"]),
        ({"hooks.clip_fc.max": 0.01}, ["b"]),
        ({"hooks.clip_fc.max": "1e-2"}, ["b"]),
        ({"hooks.clip_fc.max": None}, ["sweeps/x/0", "c", "a"]),
        ({"experiment": None}, ["sweeps/x/0", "c"]),
        ({"experiment": ["", "other"]}, ["sweeps/x/0", "c", "a"]),
        ({"hooks": ""}, ["sweeps/x/0"]),
        ({"val/loss": math.nan}, ["c"]),
        ({"val/loss": math.isnan}, ["c"]),
        ({"val/accuracy": None}, ["sweeps/x/0", "c", "a"]),
        ({"train.shuffle": True}, ["c"]),
        ({"seed": 10}, ["a"]),
        ({"overrides": "seed=9"}, ["c"]),
        ({"val/accuracy": 0.8}, ["b"]),
        ({"val/accuracy": lambda value: value > 0.5}, ["b"]),
        ({"started": "2026-05-0[1]*"}, []),
        ({"started": "2026-05-01*"}, ["b"]),
    ],
)
def test_filters_keep_the_runs_that_fit(
    folder: Path, conditions: dict[str, Any], expected: list[str]
) -> None:
    assert names(hookrun.runs(folder).where(conditions)) == expected
    if all(map(str.isidentifier, conditions)):
        assert names(hookrun.runs(folder).where(**conditions)) == expected


def test_a_filter_that_was_right_may_leave_none(folder: Path) -> None:
    failed = hookrun.runs(folder).where(status="failed")
    assert names(failed.where(experiment="clip_fc")) == [], "another run has it"
    assert repr(failed[1:]) == f"<0 runs of {folder}: none>"


def test_wrong_keys_and_values_name_the_nearest(folder: Path) -> None:
    with pytest.raises(hookrun.SpecError) as refused:
        hookrun.runs(folder).where(
            {"val/acuracy": 1}, experimet="clip_fc", experiment="clip_fcc", status="dne"
        )
    hints = {problem.where: problem.hint for problem in refused.value.errors}
    fixes = {problem.where: problem.fix for problem in refused.value.errors}
    assert fixes["experimet"] == Fix("experiment", "clip_fc")
    assert fixes["experiment"] == Fix("experiment", "clip_fc")
    assert hints["experimet"].startswith("did you mean 'experiment'")
    assert hints["experiment"] == "did you mean 'clip_fc'?"
    assert hints["val/acuracy"].startswith("did you mean 'val/accuracy'")
    assert hints["status"] == "did you mean 'done'?"
    with pytest.raises(hookrun.SpecError, match="did you mean 'paper'"):
        hookrun.runs(folder).where(tags=["paper", "papers"])
    with pytest.raises(hookrun.SpecError, match="did you mean 'started'"):
        hookrun.runs(folder).sorted("startd")


def test_what_is_not_a_condition_is_refused(folder: Path) -> None:
    with pytest.raises(hookrun.SpecError, match='write status="done"'):
        hookrun.runs(folder).where("status=done")  # type: ignore[arg-type]
    with pytest.raises(hookrun.SpecError, match="None: is not a key"):
        hookrun.runs(folder).sorted(None)  # type: ignore[arg-type]


def test_runs_are_sorted_by_any_key(folder: Path) -> None:
    found = hookrun.runs(folder)
    assert names(found.sorted("seed")) == ["b", "sweeps/x/0", "c", "a"], "as numbers"
    assert names(found.sorted("seed", reverse=True)) == ["a", "c", "sweeps/x/0", "b"]
    for reverse in (False, True):
        assert names(found.sorted("val/accuracy", reverse=reverse))[0] == "b", "the others have none"
        assert names(found.sorted("val/loss", reverse=reverse))[0] == "b", "NaN comes last"
    assert names(found.sorted("name")) == ["a", "b", "c", "sweeps/x/0"]


def test_the_table_has_a_row_for_each_run(folder: Path) -> None:
    table = hookrun.runs(folder).table()
    assert list(table["name"]) == ["sweeps/x/0", "c", "a", "b"]
    assert list(table["started"]) == list(
        pandas.to_datetime([f"2026-05-0{day}" for day in (4, 3, 2, 1)], utc=True)
    )
    last = table.iloc[-1]
    assert last["directory"] == str(folder / "b")
    assert last["hooks"] == "clip_fc: grad clamp fc.weight, fc.bias"
    assert last["overrides"] == "experiment=clip_fc hooks.clip_fc.max=0.01 seed=1"
    assert (last["tags"], last["duration"], last["val/loss"]) == ("paper", 0.0, 0.3)
    assert table["val/loss"].isna().tolist() == [True, True, True, False]
    assert list(table["note"]) == ["", "", "a try", ""]


def test_the_arrow_table_equals_that_of_pandas(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    found = hookrun.runs(folder)
    table = found.table("arrow")
    assert isinstance(table, pyarrow.Table)
    assert table.column_names == list(found.table().columns)
    assert str(table["val/loss"].to_pylist()) == "[None, nan, None, 0.3]", "NaN is not nothing"


def test_without_pandas_the_error_says_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hookrun.HookrunError, match="pip install pandas"):
        hookrun.runs(folder).table()


def test_damaged_runs_are_in_the_table(folder: Path) -> None:
    (folder / "a/status.json").write_text(json.dumps("no mapping"))
    table = hookrun.runs(folder).table()
    assert table.set_index("name").loc["a", "status"] == "damaged"
    assert "status.json" in table.set_index("name").loc["a", "damaged"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_listed(folder: Path) -> None:
    (folder / "a").chmod(0)
    (summary,) = hookrun.runs(folder).where(name="a").summaries
    (folder / "a").chmod(0o755)
    assert summary.status == "damaged"
    assert "Permission denied" in summary.damaged
