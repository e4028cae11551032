"""Typed overrides: trusted packages, root keys of the command line alone, and the quotes that an override needs."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.compose.hydra import parse_override
from hookrun.compose.overrides import Resume, quoted, take, take_resume, take_trust
from hookrun.errors import SpecError


@pytest.mark.parametrize(
    ("typed", "trusted"),
    [
        ([], []),
        (["+trust=mypkg"], ["mypkg"]),
        (["+trust=[mypkg]"], ["mypkg"]),
        (["trust=[mypkg, other.sub_1]"], ["mypkg", "other.sub_1"]),
        (["+trust=a", "++trust=[b]"], ["a", "b"]),
        (["+trust=[]"], []),
    ],
    ids=str,
)
def test_trusted_packages_are_removed_from_the_overrides(typed: list[str], trusted: list[str]) -> None:
    assert take_trust(["seed=1", *typed, "model.trust=1"]) == (set(trusted), ["seed=1", "model.trust=1"])


@pytest.mark.parametrize(
    "typed",
    [
        "+trust=a,b",
        "+trust=",
        "+trust=3",
        "+trust=null",
        "+trust={a: b}",
        "+trust=[a",
        "+trust=['']",
        "+trust=/a/b",
    ],
)
def test_anything_but_package_names_is_refused(typed: str) -> None:
    with pytest.raises(SpecError, match=r"write \+trust=\[mypkg,other\]"):
        take_trust([typed])


values = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=12)


@given(values)
def test_a_quoted_override_reaches_hydra_unchanged(value: str) -> None:
    """A shell removes the outer quotes, Hydra the inner ones."""
    shown = quoted(f"+hooks.c.select={value}")
    if shown is None:
        assert value[0] in "'\"" or "${" in value
        return
    (word,) = shlex.split(shown)
    assert parse_override(word).value() == value


@pytest.mark.parametrize("text", ["seed", "seed=", "seed='a", 'seed="a', "seed=a${b}"])
def test_quotes_are_not_suggested_where_they_do_not_help(text: str) -> None:
    assert quoted(text) is None


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
    assert take("fail_fast", ["fail_fast=true", "seed=1"], is_flag=True) == (True, ["seed=1"])
    assert take("fail_fast", ["fail_fast=false"], is_flag=True) == (False, [])
    for wrong in ("1", "maybe", "'true'"):
        with pytest.raises(SpecError, match="expected true or false"):
            take("fail_fast", [f"fail_fast={wrong}"], is_flag=True)


def test_resume_needs_a_name() -> None:
    assert take_resume(["resume=2026", "resume_anyway=true"]) == (Resume("2026", anyway=True), [])
    assert take_resume(["resume_anyway=false", "a=1"]) == (None, ["a=1"])
    for wrong in (["resume_anyway=true"], ["resume="], ["resume=true"]):
        with pytest.raises(SpecError):
            take_resume(wrong)
