"""Reading YAML files: errors name the file, and aliases that multiply are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hookrun.errors import SpecError
from hookrun.yaml_files import MAX_VALUES, reading, refuse_bomb


def layers(depth: int, width: int) -> str:
    lines = [f"l0: &l0 [{', '.join('1' * width)}]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("text", [layers(7, 9), "a: &a [1, *a]\n", "a: &a {b: *a}\n"])
def test_aliases_that_multiply_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES:,} values"):
        refuse_bomb(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: &a {b: 1}\nc: {<<: *a, d: 2}\n",
        layers(3, 9),
        "select: 'R&D*'\n",
        "# & and * in a comment\n",
        "big: [" + "1, " * 50_000 + "1]\n",
    ],
    ids=["empty", "merge", "few layers", "no aliases", "comment", "long"],
)
def test_what_people_write_is_read(text: str) -> None:
    refuse_bomb(text)


@pytest.mark.parametrize("text", [b"a: \xe9\n", b"a: \x01\n", b"a: *b\n", layers(7, 9).encode()])
def test_whatever_is_wrong_names_the_file(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(SpecError) as refused, reading(file):
        OmegaConf.load(file)
    (problem,) = refused.value.errors
    assert problem.where.startswith(str(file))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused, reading(tmp_path):
        pytest.fail("a folder was read as a file")
    (problem,) = refused.value.errors
    assert (problem.where, problem.what) == (str(tmp_path), "Is a directory")
