"""What a tensor argument may be in YAML: a number, a nested list, a tensor in a file, a capture of another run."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from hookrun.actions.given import GivenFunction, GivenTensor, given


class FileValue(BaseModel):
    """A tensor of a `.safetensors` file; `key` may be left out where the file holds one tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    key: str | None = None
    per_sample: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.file}[{self.key}]" if self.key else self.file


class RunValue(BaseModel):
    """What another run captured at a module.

    sample: `mean` over all rows; the row of the sample with that number; `same`, for each sample of the batch its own
            row; `resample`, for each sample the row of another one, drawn anew at each firing
    path:   which tensor, where the run captured a container there: ``[0]``, ``grad_input``
    minus:  a value that is subtracted, for the difference of two runs; its keys default to those beside it
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str
    capture: str
    module: str
    path: str | None = None
    sample: Literal["mean", "same", "resample"] | Annotated[int, Field(strict=True, ge=0)] = "mean"
    reduce: Literal["mean"] | None = None
    minus: RunValue | None = None

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, raw: Any) -> Any:
        """`minus` names only what differs; `sample: index` with `index: 3` is `sample: 3`."""
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        sample, minus = raw.get("sample", "mean"), raw.get("minus")
        if sample not in ("mean", "same", "resample", "index") and not isinstance(sample, int):
            raise ValueError(
                f"sample: found {sample!r}, expected mean, same, resample, index or a sample's number"
            )
        if minus is not None and not isinstance(minus, dict | RunValue):
            raise ValueError(f"minus: found {minus!r}, expected a mapping such as {{run: another}}")
        if raw.get("sample") == "index":
            if "index" not in raw:
                raise ValueError("`sample: index` goes with `index`, the number of a sample")
            raw["sample"] = raw.pop("index")
        if isinstance(raw.get("minus"), dict):
            shared = {key: raw[key] for key in ("run", "capture", "module", "path") if key in raw}
            raw["minus"] = {**shared, **raw["minus"]}
        return raw

    @model_validator(mode="after")
    def _reduces_one_thing(self) -> RunValue:
        if self.reduce is not None and self.sample != "mean":
            raise ValueError(f"`reduce: mean` is over all rows, `sample: {self.sample}` takes some of them")
        return self

    @property
    def per_sample(self) -> bool:
        """Whether each sample of a batch has a value of its own."""
        return self.sample in ("same", "resample") or (self.minus is not None and self.minus.per_sample)

    @property
    def draws(self) -> bool:
        """Whether it is another value at each firing."""
        return self.sample == "resample" or (self.minus is not None and self.minus.draws)

    def __str__(self) -> str:
        what = f"sample {self.sample}" if isinstance(self.sample, int) else self.sample
        text = f"{what} of {self.capture}/{self.module}{self.path or ''} in {self.run}"
        return text if self.minus is None else f"{text} minus {self.minus}"


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
    if isinstance(raw, dict) and not {"run", "file"} & raw.keys():
        raise ValueError(
            f"found the keys {', '.join(map(str, raw))}, expected `file`, or `run` with what belongs to it"
        )
    if isinstance(raw, dict):
        return RunValue.model_validate(raw) if "run" in raw else FileValue.model_validate(raw)
    if isinstance(raw, FileValue | RunValue):
        return raw
    if (found := given(raw)) is not None:
        return found
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


Value = Annotated[
    float
    | tuple[Any, ...]
    | FileValue
    | RunValue
    | SkipJsonSchema[GivenTensor]
    | SkipJsonSchema[GivenFunction],
    BeforeValidator(_value),
]
"""Number, nested list of numbers, `{file:, key:}` or `{run:, capture:, module:, sample:, minus:}`.

In Python also a tensor, or a function of the tensor that the action is given, whose result is taken as a constant.
"""


def fixed_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a value that says it by itself: a list, or a tensor; None: it fits anything, or nobody knows yet."""
    if isinstance(value, GivenTensor):
        return value.shape
    return shape_of(value) if isinstance(value, tuple) else None
