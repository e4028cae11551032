"""Data given from Python, `name: given`: a data set, a loader, a list of samples, or a mapping from split to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hookrun.data.info import SPLITS, DataInfo, InputsInfo, Split, TensorInfo
from hookrun.data.own import as_tensors, info_of, info_of_inputs, number_of_classes
from hookrun.data.samples import Samples, TensorSamples
from hookrun.data.source import Source
from hookrun.engine.keys import GIVEN
from hookrun.errors import HookrunError, nearest, reason, refused_at, spec_error

WHERE = "data"
_FORM = "(input, target), an input alone, or a dict of the model's keywords"
_lent: ContextVar[Any] = ContextVar("lent data", default=None)


@contextmanager
def data_lent(data: Any) -> Iterator[None]:
    """Within the block `data.name: given` is this data."""
    token = _lent.set(data)
    try:
        yield
    finally:
        _lent.reset(token)


def parts_of(data: Any, split: Split) -> dict[Split, Any]:
    """The data set, loader or list of each split, checked.

    split: the one that is meant if `data` does not say it

    Raises SpecError for a split of another name, and for what has no samples that can be read by their numbers.
    """
    if not isinstance(data, Mapping):
        data = {split: data}
    if not data:
        raise spec_error(WHERE, "found a mapping without splits", "give a data set for train or val")
    for name, part in data.items():
        if name not in SPLITS:
            hint = f"{nearest(str(name), SPLITS)}: data={{'val': DATA[{name!r}]}}"
            raise spec_error(WHERE, f"found the split {name!r}", hint)
        _check(part)
    return {each: data[each] for each in SPLITS if each in data}


def samples_in(part: Any) -> Any:
    """The samples of a part: what a loader reads, or the part itself."""
    return part.dataset if isinstance(part, DataLoader) else part


def _check(part: Any) -> None:
    samples = samples_in(part)
    kind = type(samples).__qualname__
    if isinstance(part, DataLoader) and not isinstance(samples, IterableDataset):
        makes_batches = type(part).__iter__ is DataLoader.__iter__ and part.batch_sampler is not None
        if not makes_batches:
            what = f"the {type(part).__qualname__} does not make batches from lists of the numbers of samples"
            raise spec_error(WHERE, what, "give its data set, with data.batch_size")
    if isinstance(samples, tuple):
        hint = "give a list of samples, or torch.utils.data.TensorDataset(inputs, targets)"
        raise spec_error(WHERE, "a tuple may be samples, or inputs and targets", hint)
    is_numbered = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if isinstance(samples, IterableDataset | str | bytes) or not is_numbered:
        hint = "give a data set with __len__ and __getitem__, or a list: list(itertools.islice(DATA, 1000))"
        raise spec_error(WHERE, f"the {kind} has no samples that can be read by their numbers", hint)
    if not len(samples):
        raise spec_error(WHERE, f"the {kind} has no samples", "give at least one")


class GivenData(Source):
    """The data that was given from Python.

    args:     split -> the record of its data
    as_given: samples may be anything, for a collate function of the user's own
    """

    name = GIVEN
    args: dict[str, Any]
    as_given: bool

    @property
    def parts(self) -> dict[Split, Any]:
        """The part of each split. Raises SpecError where none is given."""
        if _lent.get() is None:
            hint = "give it again: hookrun.run(…, data=DATA), or name a data set"
            raise spec_error(f"{WHERE}.name", "the data was given from Python", hint)
        return parts_of(_lent.get(), "val" if "val" in self.args else "train")

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        """One sample is read for its shape and dtype."""
        samples = self.open(root, split, 0)
        inputs: Any = {}
        target: Any = None
        if not self.as_given:
            with refused_at(WHERE, f"let a sample be {_FORM}"):
                inputs, target = samples[0]
        inputs_info = info_of_inputs(inputs)
        target_info = info_of(target) if isinstance(target, Tensor) and target.numel() else None
        sizes: dict[Split, int | None] = dict.fromkeys(SPLITS, 0)
        for each, part in self.parts.items():
            # how many of them a pass of a loader reads is its own matter
            sizes[each] = None if isinstance(part, DataLoader) else len(part)
        return DataInfo(
            name=GIVEN,
            inputs=inputs_info,
            target=target_info,
            num_classes=number_of_classes(samples_in(self.parts[split])),
            sizes=sizes,
            samples=samples,
            remarks=partial(self._remarks, split, inputs_info, target_info),
        )

    def _remarks(self, split: Split, inputs: InputsInfo, target: TensorInfo | None) -> Iterator[str]:
        for each, part in self.parts.items():
            line = f"data given from Python, {each}: {len(samples_in(part))} samples of a {type(part).__qualname__}"
            if isinstance(part, DataLoader):
                sampler = getattr(part.batch_sampler, "sampler", part.batch_sampler)
                line += (
                    f", in {len(part)} batches of its own in the order of its {type(sampler).__qualname__}"
                )
            yield line
        if inputs:
            named = {"input": inputs} if isinstance(inputs, TensorInfo) else inputs
            of_sample = [f"{name} {info}" for name, info in named.items()]
            yield f"  a sample of {split}: {', '.join(of_sample)}; target {target or 'none'}"

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        part = self.parts.get(split)
        if part is None:
            raise spec_error(
                WHERE, f"the split '{split}' has no samples", f"give them: data={{'{split}': DATA}}"
            )
        data = samples_in(part)
        classes = getattr(data, "classes", ())
        if not isinstance(classes, list | tuple) or not all(isinstance(each, str) for each in classes):
            classes = ()
        if type(data) is TensorDataset and len(data.tensors) == 2 and not self.as_given:
            samples: Samples = TensorSamples(*data.tensors, classes)
        else:
            samples = Samples(len(data), partial(_read, data, self.as_given), classes=classes)
            samples.draws = not isinstance(data, list)
        if isinstance(part, DataLoader):
            samples.sampler = part.batch_sampler
        return samples


def _read(data: Any, as_given: bool, index: int) -> Any:
    """Sample `index` of the data, as (input, target) of tensors."""
    at = f"sample {index} of the {type(data).__qualname__}"
    try:
        sample = data[index]
    except (IndexError, HookrunError):
        raise
    except Exception as error:
        raise HookrunError(f"{at} failed: {reason(error)}") from error
    if as_given:
        return sample
    return as_tensors(*_pair(sample, at), at)


def _pair(value: Any, at: str) -> tuple[Any, Any]:
    """Inputs and targets of a sample or a batch; None for targets that it does not have."""
    if not isinstance(value, tuple | list):
        return value, None
    if len(value) == 1:
        return value[0], None
    if len(value) != 2:
        what = f"{at} is a {type(value).__qualname__} of {len(value)}, expected {_FORM}"
        raise HookrunError(f"{what}; several inputs are a tuple: ((a, b), target)")
    return value[0], value[1]


def collate_of(parts: Mapping[Split, Any]) -> Callable[[Any], Any] | None:
    """The function of the loaders that makes batches; None if it is torch's. SpecError if they have different ones."""
    functions = list[Any]()
    for part in parts.values():
        functions.append(part.collate_fn if isinstance(part, DataLoader) else default_collate)
    if any(each != functions[0] for each in functions):
        raise spec_error(
            WHERE,
            "the splits have different functions collate_fn",
            "give all of them one loader each, with the same",
        )
    return None if functions[0] is default_collate else functions[0]


def settings_of(parts: Mapping[Split, Any]) -> dict[str, Any]:
    """The keys of the section `data` that loaders decide."""
    settings = dict[str, Any]()
    if collate_of(parts) is not None:
        settings["collate"] = GIVEN
    for part in parts.values():
        if isinstance(part, DataLoader):
            settings["workers"] = part.num_workers
            if part.batch_size is not None:
                settings["batch_size"] = part.batch_size
    return settings


def collate_given() -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """Samples -> inputs and targets of a batch, by the loaders' own function."""
    collate: Any = collate_of(parts_of(_lent.get(), "train"))

    def collated(samples: Sequence[Any]) -> tuple[Any, Any]:
        try:
            batch = collate(samples)
        except Exception as error:
            raise HookrunError(f"{WHERE}: the loader's collate_fn failed: {reason(error)}") from error
        return _pair(batch, "a batch")

    return collated
