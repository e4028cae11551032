"""Tensor arguments in YAML: a number, a list, a file, or a capture of another run; in Python tensors and functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, core_schema

from hookrun.engine.trust.callables import Code, code_of_given, is_tensor, tensor_digest
from hookrun.engine.validation import Section
from hookrun.engine.values.index import AnyIndex
from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import nearest

if TYPE_CHECKING:
    from torch import Tensor


class PythonValue(ABC):
    """Base class for Python objects in a spec: shown by name or shape, compared and hashed by content."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain data that identifies the object."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(str(self.to_dict()))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.to_dict())
        )


class InlineTensor(PythonValue):
    """A copy of a tensor, made when the spec was read; later changes of the caller's tensor do not affect it.

    Raises ValueError for a tensor that cannot be copied: on the meta device, sparse, or sharded over ranks.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_meta or str(tensor.layout) != "torch.strided" or type(tensor).__name__ == "DTensor":
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"found a {kind} {type(tensor).__name__} of shape {list(tensor.shape)}, expected a dense tensor"
            )
        self.tensor = tensor.detach().clone()
        self.shape = tuple(tensor.shape)
        self.digest = tensor_digest(self.tensor)

    def __str__(self) -> str:
        return f"tensor{list(self.shape)} {str(self.tensor.dtype).removeprefix('torch.')}"

    def to_dict(self) -> dict[str, Any]:
        """Shape, dtype and hash."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return {"tensor": list(self.shape), "dtype": dtype, "sha256": self.digest}


class InlineFunction(PythonValue):
    """A function or another callable, hashed when the spec was read."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.code: Code = code_of_given(target)
        self.digest = self.code.sha256

    def __str__(self) -> str:
        return self.code.name

    def to_dict(self) -> dict[str, Any]:
        """Name and hash."""
        return dict(self.code.to_dict())


def as_python_value(raw: object) -> InlineTensor | InlineFunction | None:
    """`raw` as an InlineTensor or InlineFunction; None if it is neither a tensor nor a function. Raises ValueError."""
    if isinstance(raw, InlineTensor | InlineFunction):
        return raw
    if is_tensor(raw):
        return InlineTensor(raw)  # type: ignore[arg-type]
    return InlineFunction(raw) if callable(raw) else None


def copy_of(value: Any) -> Any:
    """A copy of arguments: containers and tensors are copied, other objects are not."""
    if isinstance(value, Mapping):
        return {key: copy_of(member) for key, member in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(copy_of, value))
    if not is_tensor(value):
        return value
    with ordinary_tensors():
        return value.detach().clone()


def as_data(value: Any) -> Any:
    """Arguments as data for JSON: tensors and functions by their hashes, other objects by the names of their types."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): as_data(member) for key, member in value.items()}
        case list() | tuple() | set() | frozenset():
            return [as_data(member) for member in value]
    python_value = None if isinstance(value, type) else as_python_value(value)
    if python_value is not None:
        return python_value.to_dict()
    return f"{type(value).__module__}:{type(value).__qualname__}"


class Ramp(Section):
    """A number that follows the clock: linear between two steps, and constant before and after them.

    from, to: the number at the first and at the last of the two steps
    steps:    optimizer steps in training, also in a validation within it; batches otherwise
    """

    model_config = ConfigDict(serialize_by_alias=True)
    start: Annotated[float, Field(strict=True, allow_inf_nan=False, alias="from")]
    to: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    steps: tuple[
        Annotated[int, Field(strict=True, ge=0, le=10**15)], Annotated[int, Field(strict=True, le=10**15)]
    ]

    @model_validator(mode="after")
    def _takes_steps(self) -> Ramp:
        first, last = self.steps
        if last <= first:
            raise ValueError(f"steps: the last step, {last}, is not after the first one, {first}")
        return self

    def at(self, step: int) -> float:
        """The number at a step."""
        first, last = self.steps
        part = min(max(step - first, 0) / (last - first), 1)
        return self.start * (1 - part) + self.to * part

    def __str__(self) -> str:
        return f"{self.start:g} to {self.to:g} over steps {self.steps[0]} to {self.steps[1]}"


Scheduled = Annotated[
    Annotated[float, Field(strict=True, allow_inf_nan=False)] | Ramp,
    BeforeValidator(lambda raw: Ramp.model_validate(raw) if isinstance(raw, dict) else raw),
]
"""A finite number, which may follow the clock."""


def at_step(value: Any, step: int) -> Any:
    """The number that a Ramp has at a step; any other value as it is."""
    return value.at(step) if isinstance(value, Ramp) else value


_MINUS = {
    "type": ["object", "null"],
    "description": "a value from a file or a run; keys that are left out have the values beside `minus`",
}


class OutsideValue(Section, ABC):
    """Base class of values from files and from other runs: ``factor * (value[index] - minus)``.

    index:  which part of the value, in NumPy's notation; for values by sample the part of each sample's row
    minus:  a value to subtract; its keys default to those beside `minus`
    factor: factor of the difference; it may follow the clock
    at:     ``same``: broadcast the value to the whole tensor and take the part that the hook acts on
    """

    factor: Scheduled = 1.0
    index: AnyIndex | None = None
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
            shared = ["index", "at"]
            if ("file" if "run" in raw else "run") not in minus:  # it is of the same kind
                shared += ["run", "capture", "module", "path", "file", "key"]
            raw["minus"] = {key: raw[key] for key in shared if key in raw} | minus
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
        if self.minus is not None and isinstance(self.minus.factor, Ramp):
            raise ValueError("the factor in `minus` is a number: the one beside `minus` may follow the clock")
        return self

    @property
    @abstractmethod
    def source(self) -> str:
        """Text for the plan that names the file or the capture."""

    def __str__(self) -> str:
        return self._text() if self.at is None else f"{self._text()} at the same place"

    def _text(self) -> str:
        text = self.source
        if self.index is not None:
            text += f"[{self.index}]"
        if self.minus is not None:
            text += f" minus {self.minus._text()}"
        if self.factor == 1:
            return text
        factor = f"({self.factor})" if isinstance(self.factor, Ramp) else f"{self.factor:g}"
        return f"{factor} * ({text})"


class FileValue(OutsideValue):
    """A tensor of a `.safetensors` file.

    key: its name, in which a `*` stands for the path of the hooked module; not needed if the file has only one tensor
    """

    file: str
    key: str | None = None

    @property
    def is_by_module(self) -> bool:
        """Whether each hooked module has its own."""
        return self.key is not None and "*" in self.key

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
    def source(self) -> str:
        """Text for the plan that names the capture and the rows."""
        rows = f"sample {self.sample}" if isinstance(self.sample, int) else self.sample
        module = "(the same module)" if self.module is None else self.module
        return f"{rows} of {self.capture}/{module}{self.path or ''} in {self.run}"


class FolderValue(Section):
    """What a folder holds: a configuration, cfg.json, and tensors.

    folder: its path; a relative one is below the folder in which the program was started
    """

    folder: str

    def __str__(self) -> str:
        return self.folder


class PassValue(Section):
    """What a capture hook has seen earlier in the same forward of the model, with its graph: gradients flow into it.

    hook:   the capture hook
    module: where it has seen it; by default its only module
    """

    digest: ClassVar[str] = "of the same forward"
    hook: str
    module: str | None = None

    def __str__(self) -> str:
        return f"{self.hook} at {'its module' if self.module is None else self.module or '(root)'} in this forward"


class RunFaults(Section):
    """The faults that another run has listed.

    run: directory of the run, the name of one of the experiment's `needs`, or `previous`
    """

    run: str

    def __str__(self) -> str:
        return f"those of {self.run}"


def parts_of(value: Any) -> Iterator[Any]:
    """The value itself, what is subtracted from it, what is subtracted from that, …"""
    yield value
    if isinstance(value, OutsideValue) and value.minus is not None:
        yield from parts_of(value.minus)


def is_by_sample(value: Any) -> bool:
    """Whether each sample of a batch has its own value."""
    return any(isinstance(part, RunValue) and part.sample in ("same", "resample") for part in parts_of(value))


def is_drawn(value: Any) -> bool:
    """Whether the value is drawn at random at each firing."""
    return any(isinstance(part, RunValue) and part.sample == "resample" for part in parts_of(value))


_MAPPINGS: Mapping[str, type[Section]] = {
    "from": Ramp,
    "run": RunValue,
    "file": FileValue,
    "hook": PassValue,
}
"""The key by which each kind of value is recognized -> its class."""


def _value(raw: Any) -> Any:
    match raw:
        case int() | float() if not isinstance(raw, bool):
            return float(raw)
        case list() | tuple():
            shape_of(raw)
            return _frozen(raw)
        case dict():
            return _mapped(raw)
        case Ramp() | OutsideValue() | PassValue():
            return raw
    python_value = as_python_value(raw)
    if python_value is not None:
        return python_value
    text = f"found {raw!r}, expected a number, a list of numbers, or a mapping with `file` or `run`"
    if str(raw) in {"inf", "-inf", "nan"}:
        text += " (YAML writes infinity and not-a-number as .inf and .nan)"
    raise ValueError(text)


def _mapped(raw: dict[Any, Any]) -> Section:
    """The value of a mapping, by the key that only one kind of value has."""
    for key, kind in _MAPPINGS.items():
        if key in raw:
            return kind.model_validate(raw)
    text = f"found the keys {', '.join(map(str, raw))}, "
    text += "expected `file`, `run` and `capture`, `hook`, or from, to, steps"
    fields = set[str]()
    for kind in _MAPPINGS.values():
        fields |= {field.alias or name for name, field in kind.model_fields.items()}
    typos = [key for key in raw if key not in fields]
    if typos:
        text += f"; {typos[0]}: {nearest(str(typos[0]), fields)}"
    raise ValueError(text)


def _frozen(raw: Any) -> Any:
    return tuple(_frozen(item) for item in raw) if isinstance(raw, list | tuple) else float(raw)


def numbers(value: Any) -> Iterator[float]:
    """Every number of a value that is written out; of a Ramp the first and the last."""
    match value:
        case float():
            yield value
        case Ramp():
            yield from (value.start, value.to)
        case tuple():
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
    | Ramp
    | FileValue
    | RunValue
    | PassValue
    | SkipJsonSchema[InlineTensor]
    | SkipJsonSchema[InlineFunction],
    BeforeValidator(_value),
]
"""Number, nested list of numbers, `{from:, to:, steps:}`, `{file:, key:}` or `{run:, capture:, module:, sample:}`.

In Python also a tensor, or a function of the action's tensor, whose result is used as a constant.
"""


def fixed_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a list or a tensor; None for a number, which fits any shape, and for a shape not known yet."""
    if isinstance(value, InlineTensor):
        return value.shape
    return shape_of(value) if isinstance(value, tuple) else None
