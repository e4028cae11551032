"""Reading YAML files: errors name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.errors import SpecError
from hookrun.yaml_files import load, reading


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
