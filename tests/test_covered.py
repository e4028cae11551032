"""The table of scripts/coverage: sums by folder, percentages of sums."""

from __future__ import annotations

import covered


def about(lines: tuple[int, int], branches: tuple[int, int]) -> dict[str, object]:
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    counts = dict(zip(names, (*lines, *branches), strict=True))
    return {"summary": {**counts, "percent_covered": 12.5, "percent_covered_display": "12"}}


def test_percentages_are_of_the_sums_of_a_folder_and_of_all() -> None:
    files = {
        "hookrun/version.py": about((1, 1), (0, 0)),
        "hookrun/spec/hook.py": about((10, 10), (1, 2)),
        "hookrun/spec/selector/glob.py": about((0, 10), (0, 2)),
    }
    assert [line.split() for line in covered.table(files).splitlines()[1:]] == [
        ["hookrun", "100.0", "–"],
        ["hookrun/spec", "50.0", "25.0"],
        ["all", "52.4", "25.0"],
    ]
