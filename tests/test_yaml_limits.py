"""Limits on YAML files: exponential aliases and ambiguous keys are refused before anything is constructed."""

from __future__ import annotations

import pytest

from hookrun.yaml_limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES, OutOfBounds, check_text


def layers(depth: int, width: int) -> str:
    lines = [f"l0: &l0 [{', '.join('1' * width)}]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (layers(7, 9), f"more than {MAX_VALUES:,} values"),
        ("a: &a [1, *a]\n", "contains itself"),
        ("a: &a {b: *a}\n", "contains itself"),
    ],
)
def test_aliases_that_multiply_are_refused(text: str, what: str) -> None:
    with pytest.raises(OutOfBounds, match=what):
        check_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: &a {b: 1}\nc: {<<: *a, d: 2}\n",
        layers(3, 9),
        "select: 'R&D*'\n",
        "# & and * in a comment\n",
        "big: [" + "1, " * 9_000 + "1]\n",
    ],
)
def test_ordinary_files_are_read(text: str) -> None:
    check_text(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ("a: 1:30\n", "base 60"),
        ("a: " + "1" * (MAX_DIGITS + 1), "expected at most"),
        ("a: ${" + "a.${" * 9 + "b" + "}" * 10, "interpolations in one another"),
    ],
)
def test_the_line_beyond_the_limits_is_reported(text: str, what: str) -> None:
    with pytest.raises(OutOfBounds, match=what) as refused:
        check_text(f"# first\n{text}")
    assert refused.value.line == 2
