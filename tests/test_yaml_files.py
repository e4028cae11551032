"""YAML files: errors name the file, and limits hold before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.config.yaml_files import load, reading
from hookrun.config.yaml_limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES, OutOfBounds, check_text
from hookrun.errors import SpecError


@pytest.mark.parametrize("text", [b"a: \xe9\n", b"a: \x01\n", b"a: *b\n", b"a: " + b"[" * 99])
def test_every_error_names_the_file(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(SpecError) as refused:
        load(file)
    (problem,) = refused.value.errors
    assert problem.where.startswith(str(file))


def test_a_file_without_read_permission_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused, reading(tmp_path):
        pytest.fail("a folder was read as a file")
    (problem,) = refused.value.errors
    assert (problem.where, problem.what) == (str(tmp_path), "Is a directory")


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
