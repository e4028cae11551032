"""Data given from Python, `name: given`: a data set, a loader, a list of samples, or a mapping from split to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.own import as_tensors, described, read
from hookrun.data.samples import Samples, TensorSamples
from hookrun.data.source import Source
from hookrun.engine.keys import GIVEN
from hookrun.errors import HookrunError, nearest, reason, refused_at, spec_error

WHERE = "data"
_FORM = "(input, target), an input alone, or a dict of the model's keywords"
_PAIR = 2
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


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides the order of the samples of a loader."""
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _check(part: Any) -> None:
    """Raise SpecError for what has no samples that can be read by their numbers."""
    samples = samples_in(part)
    kind = type(samples).__qualname__
    if isinstance(samples, tuple):
        hint = "give a list of samples, or torch.utils.data.TensorDataset(inputs, targets)"
        raise spec_error(WHERE, "a tuple may be samples, or inputs and targets", hint)
    is_numbered = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if isinstance(samples, IterableDataset | str | bytes) or not is_numbered:
        hint = "give a data set with __len__ and __getitem__, or a list: list(itertools.islice(DATA, 1000))"
        raise spec_error(WHERE, f"the {kind} has no samples that can be read by their numbers", hint)
    if not len(samples):
        raise spec_error(WHERE, f"the {kind} has no samples", "give at least one")
    if part is not samples and not _makes_numbered_batches(part):
        what = f"the {type(part).__qualname__} does not make so many batches from lists of the numbers of samples"
        raise spec_error(WHERE, what, "give its data set, with data.batch_size")


def _makes_numbered_batches(loader: DataLoader[Any]) -> bool:
    """Whether its sampler gives the numbers of the samples of each batch, and says how many batches there are."""
    try:
        len(loader)
    except TypeError:  # of a sampler without a length
        return False
    return type(loader).__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None


def settings_of(parts: Mapping[Split, Any]) -> dict[str, Any]:
    """The keys of the section `data` that loaders decide. SpecError if they make batches by different functions."""
    loaders = [part for part in parts.values() if isinstance(part, DataLoader)]
    settings: dict[str, Any] = {}
    if loaders:
        settings["workers"] = max(loader.num_workers for loader in loaders)
    if len(loaders) == len(parts) and loaders[0].batch_size is not None:
        settings["batch_size"] = loaders[0].batch_size
    if _collate_of(parts) is not default_collate:
        settings["collate"] = GIVEN
    return settings


def _collate_of(parts: Mapping[Split, Any]) -> Any:
    """The function that makes batches of the samples of every split."""
    functions: list[Any] = []
    for part in parts.values():
        functions.append(part.collate_fn if isinstance(part, DataLoader) else default_collate)
    if any(each != functions[0] for each in functions):
        hint = "give a loader with the same collate_fn for each"
        raise spec_error(WHERE, "the splits make batches by different functions", hint)
    return functions[0]


def collate_of_loaders() -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """Samples -> inputs and targets of a batch, made by the function of the loaders."""
    return partial(_collated, _collate_of(_lent_parts("train")))


def _collated(collate: Callable[[Any], Any], samples: Sequence[Any]) -> tuple[Any, Any]:
    try:
        batch = collate(samples)
    except Exception as error:
        raise HookrunError(f"{WHERE}: collate_fn failed: {reason(error)}") from error
    return _pair(batch, "a batch")


def _lent_parts(split: Split) -> dict[Split, Any]:
    """The parts of the data; `split` as in `parts_of`. Raises SpecError where none is given."""
    data = _lent.get()
    if data is None:
        hint = "give it again: hookrun.run(…, data=DATA); labels of rows are in it, by their sample_ids"
        raise spec_error(f"{WHERE}.name", "the data was given from Python, and is not stored", hint)
    return parts_of(data, split)


class GivenData(Source):
    """The data that was given from Python.

    args:     split -> the record of its data
    as_given: samples may be anything, for a function that makes batches of them
    """

    name = GIVEN
    args: dict[str, Any]
    as_given: bool

    @property
    def parts(self) -> dict[Split, Any]:
        """The part of each split. Raises SpecError where none is given."""
        return _lent_parts("val" if "val" in self.args else "train")

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        """One sample is read for its shape and dtype."""
        samples = self.open(root, split, 0)
        sizes: dict[Split, int | None] = dict.fromkeys(SPLITS, 0)
        for each, part in self.parts.items():
            # which samples a pass of a loader has is its own matter
            sizes[each] = None if isinstance(part, DataLoader) else len(part)
        data = samples_in(self.parts[split])
        with refused_at(WHERE, f"let a sample be {_FORM}"):
            info = described(GIVEN, data, samples, sizes, as_given=self.as_given)
        return replace(info, remarks=partial(self._remarks, split, info))

    def _remarks(self, split: Split, info: DataInfo) -> Iterator[str]:
        for each, part in self.parts.items():
            line = f"data given from Python, {each}: {len(samples_in(part))} samples of a {type(part).__qualname__}"
            if isinstance(part, DataLoader):
                line += f", in {len(part)} batches of its own in the order of its {type(sampler_of(part)).__qualname__}"
            if getattr(part, "worker_init_fn", None) is not None:
                line += "; its worker_init_fn is not called"
            yield line
        if info.inputs:
            inputs = {"input": info.inputs} if isinstance(info.inputs, TensorInfo) else info.inputs
            of_sample = [f"{name} {tensor}" for name, tensor in inputs.items()]
            yield f"  a sample of {split}: {', '.join(of_sample)}; target {info.target or 'none'}"

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        part = self.parts.get(split)
        if part is None:
            hint = f"give some: data={{'{split}': DATA}}"
            raise spec_error(WHERE, f"the split '{split}' has no samples", hint)
        data = samples_in(part)
        if type(data) is TensorDataset and len(data.tensors) == _PAIR and not self.as_given:
            samples: Samples = TensorSamples(data.tensors[0], data.tensors[1])
        else:
            samples = Samples(len(data), partial(_read, data, self.as_given))
            samples.draws = type(data) is not list
        classes = getattr(data, "classes", ())
        if isinstance(classes, list | tuple):
            samples.classes = [str(each) for each in classes]
        if isinstance(part, DataLoader):
            samples.sampler = part.batch_sampler
        return samples


def _read(data: Any, as_given: bool, index: int) -> Any:
    """Sample `index` of the data, as (input, target) of tensors unless it stays as given."""
    at = f"sample {index} of the {type(data).__qualname__}"
    sample = read(data, index, at)
    if as_given:
        return sample
    inputs, target = _pair(sample, at)
    return as_tensors(inputs, target, at)


def _pair(value: Any, at: str) -> tuple[Any, Any]:
    """The inputs and the targets of a sample or a batch; None for targets that it does not have."""
    if not isinstance(value, tuple | list):
        return value, None
    if len(value) == 1:
        return value[0], None
    if len(value) != _PAIR:
        what = f"{at} is a {type(value).__qualname__} of {len(value)}, expected {_FORM}"
        raise HookrunError(f"{what}; several inputs are a tuple: ((a, b), target)")
    return value[0], value[1]
