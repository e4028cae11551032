"""The mark `cases`: every case runs, and a failure names its case and the others that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MARKED = """
import os
import pytest

ran = []

@pytest.mark.cases("a", [1, 2])
@pytest.mark.cases(("b", "c"), [(3, 4), (5, 6)])
def test_fails(a, b, c, monkeypatch, capsys):
    assert ("PATCHED" in os.environ, capsys.readouterr().out) == (False, "")
    monkeypatch.setenv("PATCHED", "1")
    print("printed")
    ran.append((a, b, c))
    if b == 3:
        pytest.fail(f"found {a}")

@pytest.mark.cases("case", [(1, 3, 4), (1, 5, 6), (2, 3, 4), (2, 5, 6)])
def test_passes(case):
    assert ran.count(case) == 1

@pytest.mark.cases("case", [])
def test_without_cases(case):
    pass

@pytest.mark.cases("case", [1, 2])
def test_a_case_is_skipped(case):
    pytest.skip("not here")
"""


def test_every_case_runs_and_a_failure_names_all_that_fail(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*Failed: found 1",
            "*in 2 of 4 cases; here: b=3, c=4, a=1",
            "*also: b=3, c=4, a=2: Failed: found 2",
            "*there is no case",
            "*a case cannot be skipped*",
        ]
    )
