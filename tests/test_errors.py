"""The exceptions: what they print, and that none can be raised without saying what is wrong."""

from __future__ import annotations

import pickle

import pytest

from hookrun.errors import CompileError, Problem, SpecError, reason


@pytest.mark.parametrize("error", [SpecError, CompileError])
def test_an_error_without_problems_cannot_be_made(error: type[SpecError | CompileError]) -> None:
    with pytest.raises(ValueError, match=f"a {error.__name__} needs at least one problem"):
        error([])


@pytest.mark.parametrize("error", [SpecError, CompileError])
def test_an_error_crosses_processes_with_its_problems(error: type[SpecError | CompileError]) -> None:
    problems = [Problem("seed", "found 'x'", "give a number"), Problem("", "there is no hook")]
    copy = pickle.loads(pickle.dumps(error(problems)))
    assert copy.errors == problems
    assert str(copy).splitlines() == [
        f"2 {error.kind}s",
        "  seed: found 'x'",
        "      give a number",
        "  there is no hook",
    ]


def test_a_reason_is_one_line() -> None:
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError()) == "ValueError"
