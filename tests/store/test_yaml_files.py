"""YAML files and their interpolations: errors name the file, and limits hold before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.engine.keys import MAX_DEPTH
from hookrun.errors import SpecError
from hookrun.store.config.interpolations import MAX_NESTED, resolved
from hookrun.store.config.yaml_files import MAX_DIGITS, OutOfBounds, check_text, parsed, plain, reading

CONF = Path(__file__).parents[2] / "conf"


def test_a_file_without_read_permission_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused, reading(tmp_path):
        pytest.fail("a folder was read as a file")
    (problem,) = refused.value.errors
    assert problem.where == str(tmp_path)
    assert problem.what == "Is a directory"


ODD = (
    "", "# a comment\n", "text\n",
    "[1, 0x1f, 0o7, 010, 1_000, 1e3, 1.5e-3, .5, -.inf, .nan, yes, on, ~, null, 2026-01-02]\n",
    "a: {b: 1, c: [x, 'y', \"z\\u00e9\"], d: ${a.b}}\n", "a: &a {b: 1}\nc: {<<: *a, d: 2}\ne: [*a, *a]\n",
    "a: >-\n  two\n  lines\n\n  more\nb: |\n  as\n   is\n", "? a\n: 1\n? [b]\n: 2\n", "1: a\ntrue: b\n",
    "a: !!str 1\nb: !!python/object/apply:pathlib.PosixPath [x, y]\n", "a: 1\na: 2\n", "a: [1, 2\n",
    "%YAML 1.1\n---\na: 1\n...\n", "a: 1\n---\nb: 2\n",
)  # fmt: skip


SHIPPED = [
    pytest.param(file.read_text("utf-8"), id=file.relative_to(CONF).as_posix())
    for file in CONF.rglob("*.yaml")
]


@pytest.mark.parametrize("text", [*ODD, *SHIPPED])
def test_errors_are_those_of_omegaconf(text: str) -> None:
    def read(function: Callable[[str], Any]) -> Any:
        try:
            content = function(text)
            if OmegaConf.is_config(content):
                content = OmegaConf.to_container(content, resolve=False)
        except Exception as error:
            return type(error), str(error)
        return type(content), str(content)

    expected = read(lambda text: OmegaConf.load(StringIO(text)))
    assert read(parsed) == expected
    assert read(plain) == expected


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


def test_long_chains_are_not_resolved() -> None:
    assert resolved(OmegaConf.create({"a": 1, "b": ["${a}", "${oc.decode:'[2]'}"]})) == {
        "a": 1,
        "b": [1, [2]],
    }
    chain = {"a0": 1, **{f"a{n}": f"${{a{n - 1}}}" for n in range(1, MAX_NESTED + 3)}}
    with pytest.raises(ValueError, match="lead to one another"):
        resolved(OmegaConf.create(chain))


def test_a_value_counts_once_for_each_interpolation() -> None:
    wide = {"a": [1] * 6_000, "b": "${a}", "c": "${oc.select:d}", "d": [2] * 3_000}
    assert resolved(OmegaConf.create(wide))["b"] == [1] * 6_000
