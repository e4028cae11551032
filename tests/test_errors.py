"""The exceptions: what they print, and that each must have a problem; mappings that explain missing keys."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hookrun.errors import CompileError, HookrunError, Lookup, Problem, SpecError, at_module, counted, reason


@pytest.mark.parametrize("error", [SpecError, CompileError])
def test_a_pickled_error_keeps_its_problems(error: type[SpecError | CompileError]) -> None:
    problems = [Problem("seed", "found 'x'", "give a number"), Problem("", "there is no hook")]
    copy = pickle.loads(pickle.dumps(error(problems)))
    assert copy.errors == problems
    lines = ["  seed: found 'x'", "      give a number", "  there is no hook"]
    assert str(copy).splitlines() == [f"2 {error.kind}s", *lines]
    with pytest.raises(ValueError, match=f"a {error.__name__} needs at least one problem"):
        error([])


def test_a_reason_has_one_line() -> None:
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError()) == "ValueError"


def test_an_exception_in_a_forward_names_the_innermost_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(1, 5))
    assert at_module(raised.value) == " (in 0.1, a Linear)"
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(3, 2)(torch.ones(1, 5))
    assert at_module(raised.value) == "", "there is only one module"
    with pytest.raises(ZeroDivisionError) as elsewhere:
        _ = 1 / 0
    assert at_module(elsewhere.value) == ""


def test_a_count_has_its_noun_in_the_singular_or_plural() -> None:
    assert [counted(count, "job") for count in (0, 1, 2000)] == ["0 jobs", "1 job", "2,000 jobs"]


def test_a_missing_key_is_told_with_similar_keys() -> None:
    found: Any = Lookup("module", "the run", {"conv1": 1, "fc": 2, "b": 3}, {"a": "fc", "b": "conv1"})
    assert (found["fc"], found["a"], found["b"]) == (2, 2, 3), "a key comes before an alias of that name"
    assert list(found) == ["conv1", "fc", "b"]
    assert len(found) == 3
    assert all(key in found for key in ("a", "b", "fc"))
    assert not any(key in found for key in ("conv2", 0, [0]))
    assert "b" in Lookup("module", "the run", {"b": 3}, {"b": "gone"})
    with pytest.raises(KeyError, match="no module 'conv2' in the run") as missing:
        found["conv2"]
    assert isinstance(missing.value, HookrunError)
    assert "conv1" in str(missing.value)
    for rows in (0, slice(0, 3), [0, 1]):
        with pytest.raises(KeyError, match="one module per name"):
            found[rows]  # type: ignore[index]
    assert found.get("conv2") is None


def test_an_error_shows_twenty_problems() -> None:
    error = SpecError([Problem(f"hooks.h{number}", "x" * 8_000) for number in range(2_000)])
    lines = str(error).splitlines()
    assert len(lines) == 22
    assert lines[0] == "2,000 configuration errors"
    assert lines[-1] == "  and 1,980 more"
    assert max(map(len, lines)) < 1_100
    assert len(error.errors) == 2_000
