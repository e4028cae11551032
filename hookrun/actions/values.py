"""Tensor arguments in YAML: a number, a nested list, a tensor in a file, or a capture of another run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from hookrun.actions.python_values import InlineFunction, InlineTensor, as_python_value
from hookrun.values.index import Index

_MINUS = {
    "type": ["object", "null"],
    "description": "a value from a file or a run; keys that are left out have the values beside `minus`",
}


class OutsideValue(BaseModel, ABC):
    """Base class of values from files and from other runs: ``factor * (value[index] - minus)``.

    index:  which part of the value, in NumPy's notation; for values by sample the part of each sample's row
    minus:  a value to subtract; its keys default to those beside `minus`
    factor: factor of the difference
    at:     ``same``: broadcast the value to the whole tensor and take the part that the hook acts on
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    factor: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 1.0
    index: Annotated[Index | None, WithJsonSchema({"type": ["string", "integer", "null"]})] = None
    at: Literal["same"] | None = None
    minus: Annotated[FileValue | RunValue | None, WithJsonSchema(_MINUS)] = None

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, raw: Any) -> Any:
        """Fill in the keys that `minus` leaves out, and read `sample: index` with `index: 3` as `sample: 3`."""
        if not isinstance(raw, dict):
            return raw
        raw = cls._own(dict(raw))
        minus = raw.get("minus")
        if minus is not None and not isinstance(minus, dict | OutsideValue):
            raise ValueError(f"minus: found {minus!r}, expected a mapping such as {{run: another}}")
        if isinstance(minus, dict):
            other = {"run": "file", "file": "run"}
            source = next(key for key in other if key in raw)
            shared = ["index", "at"]
            if other[source] not in minus:
                shared += ["run", "capture", "module", "path", "file", "key"]
            raw["minus"] = {**{key: raw[key] for key in shared if key in raw}, **minus}
        return raw

    @classmethod
    def _own(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return raw

    @field_validator("minus", mode="before")
    @classmethod
    def _of_its_kind(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return RunValue.model_validate(raw) if "run" in raw else FileValue.model_validate(raw)

    @model_validator(mode="after")
    def _is_of_one_part(self) -> OutsideValue:
        if self.minus is not None and self.minus.at != self.at:
            raise ValueError("`at` belongs beside `minus`, not into it: it takes a part of the difference")
        return self

    @property
    def per_sample(self) -> bool:
        """Whether each sample of a batch has its own value."""
        return self.minus is not None and self.minus.per_sample

    @property
    def draws(self) -> bool:
        """Whether the value is drawn at random at each firing."""
        return self.minus is not None and self.minus.draws

    @property
    @abstractmethod
    def source(self) -> str:
        """Text for the plan that names the file or the capture."""

    def __str__(self) -> str:
        return self._text() if self.at is None else f"{self._text()} at the same place"

    def _text(self) -> str:
        text = self.source + ("" if self.index is None else f"[{self.index}]")
        if self.minus is not None:
            text = f"{text} minus {self.minus._text()}"
        return text if self.factor == 1 else f"{self.factor:g} * ({text})"


class FileValue(OutsideValue):
    """A tensor of a `.safetensors` file; `key` may be left out if the file has only one tensor."""

    file: str
    key: str | None = None

    @property
    def source(self) -> str:
        """The file, and the key in it."""
        return f"{self.file}[{self.key}]" if self.key else self.file


class RunValue(OutsideValue):
    """The captured value of a module in another run.

    run:    directory of the run, the name of one of the experiment's `needs`, or `previous`
    module: the module where it was captured; by default the hooked module
    sample: `mean`: the mean over all rows; a number: the row of the sample with that id; `same`: for each sample of the
            batch its own row; `resample`: for each sample the row of another one, drawn at random at each firing
    path:   which tensor, if the run captured a container: ``[0]``, ``grad_input``
    """

    run: str
    capture: str
    module: str | None = None
    path: str | None = None
    sample: Literal["mean", "same", "resample"] | Annotated[int, Field(strict=True, ge=0)] = "mean"
    reduce: Literal["mean"] | None = None

    @classmethod
    def _own(cls, raw: dict[str, Any]) -> dict[str, Any]:
        sample = raw.get("sample", "mean")
        if sample not in ("mean", "same", "resample", "index") and not isinstance(sample, int):
            raise ValueError(
                f"sample: found {sample!r}, expected mean, same, resample, index or a sample's number"
            )
        if raw.get("sample") == "index":
            if "index" not in raw:
                raise ValueError("`sample: index` goes with `index`, the number of a sample")
            raw["sample"] = raw.pop("index")
        return raw

    @model_validator(mode="after")
    def _reduces_one_thing(self) -> RunValue:
        if self.reduce is not None and self.sample != "mean":
            raise ValueError(f"`reduce: mean` is over all rows, `sample: {self.sample}` takes some of them")
        return self

    @property
    def per_sample(self) -> bool:
        """Whether each sample of a batch has its own value."""
        return self.sample in ("same", "resample") or super().per_sample

    @property
    def draws(self) -> bool:
        """Whether the value is drawn at random at each firing."""
        return self.sample == "resample" or super().draws

    @property
    def source(self) -> str:
        """Text for the plan that names the capture and the rows."""
        what = f"sample {self.sample}" if isinstance(self.sample, int) else self.sample
        module = "(the same module)" if self.module is None else self.module
        return f"{what} of {self.capture}/{module}{self.path or ''} in {self.run}"


OutsideValue.model_rebuild()
FileValue.model_rebuild()
RunValue.model_rebuild()


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
            f"found the keys {', '.join(map(str, raw))}, expected `file`, or `run` and `capture`"
        )
    if isinstance(raw, dict):
        return RunValue.model_validate(raw) if "run" in raw else FileValue.model_validate(raw)
    if isinstance(raw, FileValue | RunValue):
        return raw
    if (python_value := as_python_value(raw)) is not None:
        return python_value
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


def numbers(value: Any) -> Iterator[float]:
    """Every number of a value that is written out."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for member in value:
            yield from numbers(member)


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
    | SkipJsonSchema[InlineTensor]
    | SkipJsonSchema[InlineFunction],
    BeforeValidator(_value),
]
"""Number, nested list of numbers, `{file:, key:}` or `{run:, capture:, module:, sample:, minus:}`.

In Python also a tensor, or a function of the action's tensor, whose result is used as a constant.
"""


def fixed_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a list or a tensor; None for a number, which fits any shape, and for a shape not known yet."""
    if isinstance(value, InlineTensor):
        return value.shape
    return shape_of(value) if isinstance(value, tuple) else None
