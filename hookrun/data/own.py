"""A user's own data, `name: python`: a factory of a trusted package returns the data set of a split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor

from hookrun.config.validation import Args, takes, wrong_call
from hookrun.data.info import SPLITS, DataInfo, InputsInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples
from hookrun.data.source import Source
from hookrun.errors import HookrunError, Problem, SpecError, reason
from hookrun.trust.load import DATA, Trusted, load

_WHERE = "data.factory"
_ARGS = "data.args"
_FORM = "(input, target): a tensor or a dict of tensors, and a tensor or a number"


class OwnArgs(Args):
    """The factory's own arguments, checked against its signature."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.model_extra or {})


@dataclass(frozen=True)
class OwnData(Source[OwnArgs]):
    """``factory(split, **args)`` returns a data set with a length, whose sample i is (input, target), or None.

    `split` is ``train`` or ``val``; None means that there is no such split. A parameter `seed` gets the experiment's.
    The attribute `num_classes` of the data set, or the length of its `classes`, is the number of labels.
    """

    factory: Trusted | None = field(default=None)
    args = OwnArgs

    def inspect(self, root: Path | None, args: OwnArgs, split: Split) -> DataInfo:
        """One sample is read for its shape and dtype."""
        found = {each: self._made(args, each, seed=0) for each in SPLITS}
        data = found[split]
        if data is None or not len(data):
            text = f"the split '{split}' has no samples"
            raise SpecError([Problem(_WHERE, text, "return a data set with some for it")])
        try:
            inputs, target = _OwnSamples(data, self._name)[0]
        except HookrunError as error:
            raise SpecError([Problem(_WHERE, str(error), f"sample i is {_FORM}")]) from error
        return DataInfo(
            name=self._name,
            inputs=_info_of(inputs),
            target=TensorInfo(tuple(target.shape), target.dtype) if target.numel() else None,
            num_classes=_classes(data),
            sizes={each: 0 if one is None else len(one) for each, one in found.items()},
        )

    def open(self, root: Path | None, args: OwnArgs, split: Split, seed: int) -> Samples:
        """The samples of the split."""
        data = self._made(args, split, seed)
        if data is None:
            text = f"the split '{split}' has no samples"
            raise SpecError([Problem(_WHERE, text, "return a data set for it")])
        return _OwnSamples(data, self._name)

    @property
    def _name(self) -> str:
        return self.name if self.factory is None else self.factory.text

    def _made(self, args: OwnArgs, split: Split, seed: int) -> Any:
        """The return value of the factory. Raises SpecError for a wrong call, and if it is not a data set."""
        factory = self.factory
        if factory is None:
            raise SpecError([Problem(_WHERE, "is missing", "write it as mypkg.data:build")])
        if problems := wrong_call(factory.target, args.given, _ARGS, factory.text, first=1, also=["seed"]):
            raise SpecError(problems)
        seeded = {"seed": seed} if takes(factory.target, "seed") else {}
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                data = factory(split, **args.given, **seeded)
        except HookrunError:
            raise
        except Exception as error:  # the user's own code may raise anything
            raise SpecError(
                [Problem(_ARGS, factory.failure(error), "correct it, or its arguments")]
            ) from error
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            what = f"'{factory.text}' returned an object of type {type(data).__qualname__} for the split '{split}'"
            hint = "return a data set with __len__ and __getitem__, as a torch.utils.data.Dataset of fixed length has"
            raise SpecError([Problem(_WHERE, what, hint)])
        return data


def own_data(text: str) -> OwnData:
    """The data of the factory with this name. Raises SpecError if it is not trusted or does not exist."""
    return OwnData("python", load(text, DATA, _WHERE))


class _OwnSamples(Samples):
    """The user's data set; each sample is checked and converted to tensors."""

    def __init__(self, data: Any, name: str) -> None:
        self._data = data
        self._name = name

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Sample:
        try:
            sample = self._data[index]
        except (IndexError, HookrunError):
            raise
        except Exception as error:
            raise HookrunError(
                f"{_WHERE}: sample {index} of '{self._name}' failed: {reason(error)}"
            ) from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise HookrunError(
                f"{_WHERE}: sample {index} of '{self._name}' is a {type(sample).__qualname__}, expected {_FORM}"
            )
        inputs, target = sample
        if isinstance(inputs, Mapping):
            return {str(name): self._tensor(each, index) for name, each in inputs.items()}, self._target(
                target, index
            )
        return self._tensor(inputs, index), self._target(target, index)

    def _target(self, value: Any, index: int) -> Tensor:
        if value is None:
            return torch.empty(0)
        if isinstance(value, bool | int):
            return torch.tensor(int(value))
        return torch.tensor(value) if isinstance(value, float) else self._tensor(value, index)

    def _tensor(self, value: Any, index: int) -> Tensor:
        try:
            return value if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HookrunError(
                f"{_WHERE}: sample {index} of '{self._name}' holds a {type(value).__qualname__}, expected {_FORM}"
            ) from error


def _info_of(inputs: Tensor | dict[str, Tensor]) -> InputsInfo:
    if isinstance(inputs, Tensor):
        return TensorInfo(tuple(inputs.shape), inputs.dtype)
    return {name: TensorInfo(tuple(each.shape), each.dtype) for name, each in inputs.items()}


def _classes(data: Any) -> int | None:
    count = getattr(data, "num_classes", None)
    if count is None and isinstance(classes := getattr(data, "classes", None), list | tuple):
        count = len(classes)
    return count if isinstance(count, int) and count > 0 else None
