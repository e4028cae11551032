"""The table at the end of COVERAGE=1 scripts/test: sums by folder, percentages of sums, a minimum for the total."""

from __future__ import annotations

import pytest

coverage = pytest.importorskip("coverage", reason="is in the extra dev")

import covered  # noqa: E402


def about(lines: tuple[int, int], branches: tuple[int, int]) -> dict[str, object]:
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    counts = dict(zip(names, (*lines, *branches), strict=True))
    return {"summary": {**counts, "percent_covered": 12.5, "percent_covered_display": "12"}}


def test_percentages_are_of_the_sums_of_a_folder_and_of_all() -> None:
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
    assert told is not None and "66.67 %" in told and "90 % of fail_under" in told
    assert covered.verdict(90.0, floor=90) is None
