"""A model and data given from Python in place of what `model.*` and `data.*` name: lent to runs, and recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookrun.errors import reason, refused_at, spec_error

if TYPE_CHECKING:
    from torch import nn

    from hookrun.data import Split

MOST_HASHED = 16
"""So many samples of a split, evenly spaced, are read for its hash."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a caller from Python gives to a command; None: what the configuration names.

    model: the module that is run, and trained in place; each job of a sweep has a copy of its own
    data:  a data set, a DataLoader, a list of samples, or a mapping from split to one of these
    """

    model: nn.Module | None = None
    data: Any = None
    _records: dict[Split, dict[str, dict[str, Any]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.model is not None:
            from torch import nn

            if not isinstance(self.model, nn.Module):
                what = f"found {type(self.model).__qualname__}, expected a torch.nn.Module"
                raise spec_error("model", what, "give a module, not a function or a class")

    @property
    def names(self) -> list[str]:
        """The sections of the configuration in whose place something is given."""
        return [name for name in ("model", "data") if getattr(self, name) is not None]

    @contextmanager
    def lent(self, *, copies: bool = False) -> Iterator[None]:
        """Within the block `model.name: given` and `data.name: given` are these.

        copies: whether each run gets a copy of the module, which itself is not changed
        """
        with ExitStack() as stack:
            if self.model is not None:
                from hookrun.models.given import module_lent

                stack.enter_context(module_lent(self.model, copies=copies))
            if self.data is not None:
                from hookrun.data.given import data_lent

                stack.enter_context(data_lent(self.data))
            yield

    def record(self, split: Split) -> dict[str, dict[str, Any]]:
        """What a configuration says of what is given, as `args` of `model` and `data`: classes, shapes and hashes.

        split: the one that is meant where the data does not say it
        """
        if split not in self._records:
            record = dict[str, dict[str, Any]]()
            if self.model is not None:
                record["model"] = record_of_module(self.model)
            if self.data is not None:
                from hookrun.data.given import parts_of

                parts = parts_of(self.data, split)
                record["data"] = {each: record_of_part(part) for each, part in parts.items()}
            self._records[split] = record
        return self._records[split]


NOTHING = Given()


def record_of_module(module: nn.Module) -> dict[str, Any]:
    """What a configuration says of a module: its class, the number of its tensors, hashes of their forms and values."""
    from hookrun.run.experiment.checksums import content_of, crc_of

    forms = list[str]()
    values = list[str]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        form, value = content_of(tensor)
        forms.append(f"{name}: {form}")
        values.append(value)
    return {
        "class": qualified(module),
        "tensors": len(forms),
        "shapes": crc_of("\n".join(forms).encode()),
        "weights": crc_of("\n".join(values).encode()),
    }


def record_of_part(part: Any) -> dict[str, Any]:
    """What a configuration says of the data of a split: its class, number of samples, and a hash of some of them."""
    from torch.utils.data import DataLoader

    from hookrun.data.given import samples_in
    from hookrun.engine.values.containers import members
    from hookrun.run.experiment.checksums import content_of, crc_of
    from hookrun.run.experiment.session import all_seeded

    samples = samples_in(part)
    count = len(samples)
    record: dict[str, Any] = {"class": qualified(samples), "samples": count}
    read = list[Any]()
    with (
        all_seeded(0),
        refused_at("data", "samples of it are read for its hash", kinds=Exception, tell=reason),
    ):
        for place in range(min(count, MOST_HASHED)):
            read += map(content_of, members(samples[place * count // min(count, MOST_HASHED)]))
    record["hash"] = crc_of(repr(read).encode())
    if isinstance(part, DataLoader):
        record["batches"] = len(part)
        record["order"] = qualified(getattr(part.batch_sampler, "sampler", part.batch_sampler))
    return record


def qualified(value: object) -> str:
    """The name of the class of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
