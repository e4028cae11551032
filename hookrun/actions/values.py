"""What a tensor argument may be in YAML: a number, a nested list, a tensor in a file, a capture of another run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


class FileValue(BaseModel):
    """A tensor of a `.safetensors` file; `key` may be left out where the file holds one tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.file}[{self.key}]" if self.key else self.file


class RunValue(BaseModel):
    """What another run captured at a module; `reduce: mean` averages it over its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str
    capture: str
    module: str
    reduce: Literal["mean"] = "mean"

    def __str__(self) -> str:
        return f"mean of {self.capture}/{self.module} in {self.run}"


def _value(raw: Any) -> Any:
    if isinstance(raw, bool) or raw is None:
        raise ValueError(
            f"found {raw!r}, expected a number, a list of numbers, or a mapping with `file` or `run`"
        )
    if isinstance(raw, int | float):
        return float(raw)
    if isinstance(raw, list | tuple):
        shape_of(raw)
        return _frozen(raw)
    if isinstance(raw, dict):
        return RunValue.model_validate(raw) if "run" in raw else FileValue.model_validate(raw)
    if isinstance(raw, FileValue | RunValue):
        return raw
    hint = (
        " (YAML writes infinity and not-a-number as .inf and .nan)"
        if str(raw) in {"inf", "-inf", "nan"}
        else ""
    )
    raise ValueError(
        f"found {raw!r}, expected a number, a list of numbers, or a mapping with `file` or `run`{hint}"
    )


def _frozen(raw: Any) -> Any:
    return tuple(_frozen(item) for item in raw) if isinstance(raw, list | tuple) else float(raw)


def shape_of(raw: Any) -> tuple[int, ...]:
    """The shape of a nested list of numbers; ValueError if it is ragged or holds anything else."""
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return ()
    if not isinstance(raw, list | tuple):
        raise ValueError(f"found {raw!r} in a list, expected numbers")
    shapes = {shape_of(item) for item in raw}
    if len(shapes) != 1:
        raise ValueError("the list is empty" if not raw else "the list is ragged: its rows differ in length")
    return (len(raw), *shapes.pop())


Value = Annotated[float | tuple[Any, ...] | FileValue | RunValue, BeforeValidator(_value)]
"""Number, nested list of numbers, `{file:, key:}` or `{run:, capture:, module:, reduce:}`."""
