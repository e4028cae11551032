"""`rows`: the files in which another program wrote rows, as keys of a task and of `hookrun.rows`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import Field, field_validator

from hookrun.engine.spec.selector import parse_selector
from hookrun.engine.validation import Section


class RowFiles(Section):
    """A folder of safetensors files of another program, read as what was captured.

    Each tensor whose name matches is a module, and the capture has the name of the folder. The files are read in the
    order of their names, in which numbers count by size: 2 before 10.

    pattern:   which files of the folder, as a glob: `*.safetensors`, `*/*.safetensors`
    key:       which tensors of a file, as a selector of modules: `hidden`, `layers.*.mlp`, `**`
    each_file: samples: each row of its tensors is a sample, numbered through all files; tokens: it is one sample, and
               the rows of its tensors are its tokens; sample: it is one sample, and each tensor is its row
    """

    pattern: str = Field(min_length=1, max_length=1_000)
    key: str = Field(max_length=1_000)
    each_file: Literal["samples", "tokens", "sample"] = "samples"

    @field_validator("pattern")
    @classmethod
    def _is_inside(cls, pattern: str) -> str:
        path = PurePath(pattern)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in pattern:
            raise ValueError(f"found {pattern!r}, expected a path below the folder, such as '*.safetensors'")
        if any("**" in part and part != "**" for part in path.parts):
            raise ValueError(f"found {pattern!r}: ** stands alone between slashes, inside a name * is enough")
        return pattern

    @field_validator("key")
    @classmethod
    def _is_selector(cls, key: str) -> str:
        parse_selector(key)
        return key
