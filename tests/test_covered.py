"""The table at the end of COVERAGE=1 scripts/test: sums by folder, percentages of sums, a minimum for the total."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from quick_coverage import resting, working

coverage = pytest.importorskip("coverage", reason="is in the extra dev")

import covered  # noqa: E402


def about(lines: tuple[int, int], branches: tuple[int, int]) -> dict[str, object]:
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    counts = dict(zip(names, (*lines, *branches), strict=True))
    return {"summary": {**counts, "percent_covered": 12.5, "percent_covered_display": "12"}}


def test_percentages_are_of_the_sums_of_a_folder() -> None:
    files = {
        "hookrun/version.py": about((1, 1), (0, 0)),
        "hookrun/engine/spec/hook.py": about((10, 10), (1, 2)),
        "hookrun/engine/spec/selector/path.py": about((0, 10), (0, 2)),
    }
    assert [line.split() for line in covered.table(files).splitlines()[1:]] == [
        ["hookrun", "100.0", "–"],
        ["hookrun/engine", "50.0", "25.0"],
        ["all", "52.4", "25.0"],
    ]


def test_the_minimum_applies_only_if_all_tests_ran(tmp_path, monkeypatch, capsys) -> None:
    settings = (
        '[tool.coverage.run]\nsource = ["tried"]\nbranch = true\n[tool.coverage.report]\nfail_under = 90\n'
    )
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "tried").mkdir()
    (tmp_path / "tried/code.py").write_text("given = 1\nif given:\n    taken = 2\nelse:\n    left = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVERAGE_FILE", raising=False)
    measured = coverage.CoverageData()
    measured.add_arcs({str(tmp_path / "tried/code.py"): [(-1, 1), (1, 2), (2, 3), (3, -1)]})
    measured.write()
    assert covered.main(part=True) is None
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == [["tried", "75.0", "50.0"], ["all", "75.0", "50.0"]]
    told = covered.main(part=False)
    assert told is not None
    assert "66.67 %" in told
    assert "90 % of fail_under" in told
    assert covered.verdict(90.0, floor=90) is None


MEASURED = """\
def called(number):
    if number:
        return given(number - 1)
    return 0

def calls():
    total = given(2)
    return total
"""


def test_a_tracer_that_rests_in_others_code_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "measured.py"
    path.write_text(MEASURED)
    found = []
    for rests in (False, True):
        spec = importlib.util.spec_from_file_location("measured", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        called = working(module.called) if rests else module.called

        def given(number: int, called=called) -> int:
            return called(number)

        module.given = resting(given) if rests else given  # type: ignore[attr-defined]
        measured = coverage.Coverage(data_file=None, config_file=False, branch=True, include=[str(path)])
        with measured.collect():
            assert module.calls() == 0
        found.append(sorted(measured.get_data().arcs(str(path)) or ()))
    assert {(2, 3), (2, 4), (7, 8)} <= {*found[0]}
    assert found[1] == found[0]
