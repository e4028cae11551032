"""Root keys that only the command line has are removed from the typed overrides."""

from __future__ import annotations

import pytest

from hookrun.cli.typed import Resume, take, take_flag, take_resume
from hookrun.errors import SpecError


def test_a_key_is_removed_with_or_without_plus_signs() -> None:
    for sign in ("", "+", "++"):
        assert take("resume", ["seed=1", f"{sign}resume=a/b", "resumes=2"]) == (
            "a/b",
            ["seed=1", "resumes=2"],
        )
    assert take("resume", ["seed=1"]) == (None, ["seed=1"])
    assert take("resume", ["resume=a b: {c"])[0] == "a b: {c", "a path that Hydra's grammar cannot read"
    for typed in (["resume=a", "+resume=b"], ["resume=a,b"], ["resume={a: 1}"]):
        with pytest.raises(SpecError):
            take("resume", typed)


def test_a_flag_is_true_or_false_and_nothing_else() -> None:
    assert take_flag("fail_fast", ["fail_fast=true", "seed=1"]) == (True, ["seed=1"])
    assert take_flag("fail_fast", ["fail_fast=false"]) == take_flag("fail_fast", []) == (False, [])
    for wrong in ("1", "maybe", "'true'"):
        with pytest.raises(SpecError, match="expected true or false"):
            take_flag("fail_fast", [f"fail_fast={wrong}"])


def test_resume_needs_a_name() -> None:
    assert take_resume(["resume=2026", "resume_anyway=true"]) == (Resume("2026", anyway=True), [])
    assert take_resume(["resume_anyway=false", "a=1"]) == (None, ["a=1"])
    for wrong in (["resume_anyway=true"], ["resume="], ["resume=true"]):
        with pytest.raises(SpecError):
            take_resume(wrong)
