"""A user's own data, `name: python`: a factory of a trusted package returns the data set of a split."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import InstanceOf
from torch import Tensor

from hookrun.data.info import SPLITS, DataInfo, InputsInfo, Split, TensorInfo
from hookrun.data.samples import Samples
from hookrun.data.source import Source
from hookrun.engine.trust.load import Trusted
from hookrun.engine.validation import takes, wrong_call
from hookrun.engine.values.containers import children, members, replaced
from hookrun.errors import HookrunError, reason, refuse, refused_at, spec_error

FACTORY = "data.factory"
"""The key path of the factory's name."""
_ARGS = "data.args"
_FORM = "(input, target): a tensor, or a dict, tuple or dataclass of tensors, and a tensor or a number"


class OwnData(Source):
    """``factory(split, **args)`` returns a data set with a length, whose sample i is (input, target), or None.

    `split` is ``train`` or ``val``; None means that there is no such split. A parameter `seed` gets the experiment's.
    The attribute `num_classes` of the data set, or the length of its `classes`, is the number of labels.

    args: the factory's arguments, checked against its signature
    as_given: samples may be anything, for a collate function of the user's own
    """

    name = "python"
    as_given: bool = False
    factory: InstanceOf[Trusted]
    args: dict[str, Any] = {}

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        """One sample is read for its shape and dtype."""
        parts = {each: self._made(each, seed=0) for each in SPLITS}
        data = parts[split]
        if data is None or not len(data):
            raise spec_error(
                FACTORY, f"the split '{split}' has no samples", "return a data set with some for it"
            )
        samples = self._samples(data)
        hint = f"sample i is {_FORM}; for anything else set data.collate=mypkg.data:collate"
        with refused_at(FACTORY, hint, tell=lambda error: str(error).removeprefix(f"{FACTORY}: ")):
            first = samples[0]
        inputs, target = ({}, torch.empty(0)) if self.as_given else first
        return DataInfo(
            name=self.factory.text,
            inputs=info_of_inputs(inputs),
            target=info_of(target) if isinstance(target, Tensor) and target.numel() else None,
            num_classes=number_of_classes(data),
            sizes={each: 0 if part is None else len(part) for each, part in parts.items()},
            samples=samples,
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        data = self._made(split, seed)
        if data is None:
            raise spec_error(FACTORY, f"the split '{split}' has no samples", "return a data set for it")
        return self._samples(data)

    def _samples(self, data: Any) -> Samples:
        return Samples(len(data), partial(_read, data, self.factory.text, self.as_given))

    def _made(self, split: Split, seed: int) -> Any:
        """The return value of the factory. Raises SpecError for a wrong call, and if it is not a data set."""
        factory = self.factory
        refuse(wrong_call(factory.target, self.args, _ARGS, factory.text, first=1, also=["seed"]))
        seeded = {"seed": seed} if takes(factory.target, "seed") else {}
        with factory.refused(_ARGS), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            data = factory(split, **self.args, **seeded)
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise spec_error(
                FACTORY,
                f"'{factory.text}' returned an object of type {type(data).__qualname__} for the split '{split}'",
                "return a data set with __len__ and __getitem__, as a torch.utils.data.Dataset of fixed length has",
            )
        return data


def number_of_classes(data: Any) -> int | None:
    """What `num_classes` of the data set says, or else how many `classes` it has; None: it does not say."""
    count = getattr(data, "num_classes", None)
    classes = getattr(data, "classes", None)
    if count is None and isinstance(classes, list | tuple):
        count = len(classes)
    return count if isinstance(count, int) and count > 0 else None


def info_of(tensor: Tensor) -> TensorInfo:
    """The description of a tensor of one sample."""
    return TensorInfo(tuple(tensor.shape), tensor.dtype)


def info_of_inputs(inputs: Any) -> InputsInfo:
    """The description of the inputs of one sample; no names for inputs other than a tensor or a dict of tensors."""
    if isinstance(inputs, Tensor):
        return info_of(inputs)
    if isinstance(inputs, dict) and all(isinstance(each, Tensor) for each in inputs.values()):
        return {name: info_of(each) for name, each in inputs.items()}
    return {}


def _read(data: Any, name: str, as_given: bool, index: int) -> Any:
    """Sample `index` of the data set that the factory `name` has made, checked and converted to tensors."""
    at = f"{FACTORY}: sample {index} of '{name}'"
    try:
        sample = data[index]
    except (IndexError, HookrunError):
        raise
    except Exception as error:
        raise HookrunError(f"{at} failed: {reason(error)}") from error
    if as_given:
        return sample
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise HookrunError(f"{at} is a {type(sample).__qualname__}, expected {_FORM}")
    return as_tensors(sample[0], sample[1], at)


def as_tensors(inputs: Any, target: Any, at: str) -> tuple[Any, Any]:
    """A sample with tensors in place of its numbers and arrays; a target that is None is an empty one.

    at: how an error begins
    """
    if target is None:
        target = torch.empty(0)
    elif isinstance(target, bool):
        target = int(target)
    return _converted(inputs, at), _converted(target, at)


def _converted(value: Any, at: str) -> Any:
    """The value with tensors in place of its numbers and arrays; an object with a method `to` stays as it is.

    A tuple of numbers is a tensor; one that holds tensors or arrays stays a tuple.
    """
    if isinstance(value, Mapping):
        return {str(key): _converted(member, at) for key, member in value.items()}
    if hasattr(value, "to"):  # a tensor is such an object too
        return value
    held = [] if isinstance(value, list) else children(value)
    if any(isinstance(member, Tensor | np.ndarray) for member in members(dict(held))):
        return replaced(value, {key: _converted(member, at) for key, member in held})
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HookrunError(f"{at} holds a {type(value).__qualname__}, expected {_FORM}") from error
