"""The runs that values name: by directory, as a need, or as the previous run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.run_values.runs import FoundRuns, used_run, used_runs
from hookrun.spec import parse_spec
from hookrun.store.files import StoreError

HOOK = {"select": "fc", "hook": "forward", "action": "scale"}


def test_a_name_is_a_need_a_directory_or_the_previous_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FoundRuns({"base": str(run), "later": None})
    assert runs.open("base") is runs.open("base"), "found once, since a link may change"
    assert runs.open("later") is None
    found = runs.open(str(run))
    assert found is not None and found.path == run
    assert runs.is_path("base2") and not runs.is_path("base") and not runs.is_path("previous")
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path))
    with pytest.raises(StoreError, match="there is no finished run"):
        FoundRuns().open("previous")
    (tmp_path / "outputs").mkdir()
    run.rename(tmp_path / "outputs/run")
    before = FoundRuns().open("previous")
    assert before is not None and before.path == tmp_path / "outputs/run"


def test_a_missing_run_is_reported_with_the_nearest_need(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="among the needs: did you mean 'base'"):
        FoundRuns({"base": None, "previous": None}).open("bsae")
    with pytest.raises(StoreError) as refusal:
        FoundRuns().open(str(tmp_path / "x"))
    assert "needs" not in str(refusal.value)


def test_used_runs_are_listed_with_plan_and_manifest(run: Path) -> None:
    runs = FoundRuns({"base": str(run), "later": None})
    used = used_run("task.run", "base", runs)
    assert used is not None and used_run("task.run", "later", runs) is None
    assert (used.where, used.run, used.path, used.need, used.plan) == (
        "task.run",
        "base",
        str(run),
        True,
        "ab" * 32,
    )
    assert used.manifest == runs.open("base").status["manifest"]  # type: ignore[union-attr]
    assert used.to_dict()["need"] is True


def test_disabled_hooks_and_missing_runs_use_none(run: Path) -> None:
    value = {"run": str(run), "capture": "seen"}
    hooks = {
        "on": HOOK | {"factor": value},
        "off": HOOK | {"factor": value, "enabled": False},
        "missing": HOOK | {"factor": value | {"run": "nowhere"}},
    }
    assert [used.where for used in used_runs(parse_spec(hooks), FoundRuns())] == ["hooks.on.factor.run"]
