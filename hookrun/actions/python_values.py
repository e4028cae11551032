"""Python objects in a spec: tensors as values, functions as values and as actions. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hookrun.trust.callables import Code, code_of_given, is_tensor, tensor_digest

if TYPE_CHECKING:
    from torch import Tensor


class PythonValue(ABC):
    """Base class for Python objects in a spec: shown by name or shape, compared and hashed by content."""

    per_sample: ClassVar[bool] = False
    draws: ClassVar[bool] = False

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
        plain = core_schema.plain_serializer_function_ser_schema(lambda value: value.to_dict())
        return core_schema.is_instance_schema(cls, serialization=plain)


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

    @property
    def digest(self) -> str:
        """The function's hash, which goes into the plan's hash."""
        return self.code.sha256

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
    return value.detach().clone() if is_tensor(value) else value


def as_data(value: Any) -> Any:
    """Arguments as data for JSON: tensors and functions by their hashes, other objects by the names of their types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_data(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(member) for member in value]
    python_value = None if isinstance(value, type) else as_python_value(value)
    if python_value is not None:
        return python_value.to_dict()
    return f"{type(value).__module__}:{type(value).__qualname__}"
