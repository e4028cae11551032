"""A model and data given from Python in place of what `model.*` and `data.*` name: lent to runs, and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookrun.engine.keys import GIVEN
from hookrun.errors import reason, refused_at, shortened, spec_error

if TYPE_CHECKING:
    from torch import nn

    from hookrun.data import Split

SECTIONS = ("model", "data")
Sections = Mapping[str, Mapping[str, Any]]
"""`model`, `data` -> the section of a configuration that stands for what is given."""

MOST_READ = 16
"""So many samples of a split, evenly spaced, are read for its hash."""

_MOST_NAME = 300


@dataclass(frozen=True, eq=False)
class Given:
    """What a caller from Python gives to a command; None: what the configuration names.

    model: the module that is run, and trained in place; each job of a sweep has a copy of its own
    data:  a data set, a DataLoader, a list of samples, or a mapping from split to one of these

    Raises SpecError for a model that is not a module.
    """

    model: nn.Module | None = None
    data: Any = None
    _sections: dict[Split, Sections] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.model is None:
            return
        from torch import nn

        if not isinstance(self.model, nn.Module):
            if isinstance(self.model, type):
                name = self.model.__qualname__
                raise spec_error("model", f"found the class {name}, expected a module", f"give {name}(…)")
            found = type(self.model).__qualname__
            raise spec_error("model", f"found {found}, expected a torch.nn.Module", "give a module")

    @property
    def names(self) -> list[str]:
        """The sections of the configuration in whose place something is given."""
        return [name for name in SECTIONS if getattr(self, name) is not None]

    @contextmanager
    def lent(self, *, copies: bool = False, resumes: bool = False) -> Iterator[None]:
        """Within the block `model.name: given` and `data.name: given` are these.

        copies:  whether each run gets a copy of the module, which itself is not changed
        resumes: whether a run goes on, whose state has the parameters that its hooks have added to the module
        """
        with ExitStack() as stack:
            if self.model is not None:
                from hookrun.engine.actions.base import remove_added
                from hookrun.models.given import module_lent

                if resumes:
                    remove_added(self.model)
                stack.enter_context(module_lent(self.model, copies=copies))
            if self.data is not None:
                from hookrun.data.given import data_lent

                stack.enter_context(data_lent(self.data))
            yield

    def sections(self, split: Split) -> Sections:
        """The sections that stand for what is given; their `args` record its classes, shapes and hashes.

        split: the one that is meant where the data does not say it

        Raises SpecError for data that cannot be used.
        """
        if split not in self._sections:
            sections: dict[str, Mapping[str, Any]] = {}
            if self.model is not None:
                sections["model"] = {"name": GIVEN, "args": _record_of_module(self.model)}
            if self.data is not None:
                from hookrun.data.given import parts_of, settings_of

                parts = parts_of(self.data, split)
                records = {each: _record_of_part(part) for each, part in parts.items()}
                sections["data"] = {"name": GIVEN, "args": records, **settings_of(parts)}
            self._sections[split] = sections
        return self._sections[split]


NOTHING = Given()


def _record_of_module(module: nn.Module) -> dict[str, Any]:
    """Its class, the number of its tensors, and hashes of their forms and values, without those that hooks added."""
    from torch.nn.parameter import is_lazy

    from hookrun.engine.actions.base import was_added
    from hookrun.run.experiment.checksums import content_of, crc_of

    forms: list[str] = []
    values: list[str] = []
    for path, each in module.named_modules():
        for name, tensor in (*each.named_parameters(path, False), *each.named_buffers(path, False)):
            if is_lazy(tensor):
                raise spec_error("model", f"{name} is not initialized yet", "call the module once before")
            if not was_added(each, name.rpartition(".")[2]):
                form, value = content_of(tensor)
                forms.append(f"{name}: {form}")
                values.append(value)
    return {
        "class": qualified_class(module),
        "tensors": len(forms),
        "shapes": crc_of(repr(forms).encode()),
        "weights": crc_of(repr(values).encode()),
    }


def _record_of_part(part: Any) -> dict[str, Any]:
    """The class of the data of a split, its number of samples, and a hash of some of them; of a loader its batches."""
    from hookrun.data.given import sampler_of, samples_in
    from hookrun.engine.values.containers import members
    from hookrun.run.experiment.checksums import content_of, crc_of
    from hookrun.run.experiment.session import all_seeded

    samples = samples_in(part)
    count = len(samples)
    number = min(count, MOST_READ)
    contents: list[Any] = []
    # random transforms draw the same each time
    with all_seeded(0), refused_at("data", "correct it", kinds=Exception, tell=reason):
        for place in range(number):
            contents += map(content_of, members(samples[place * count // number]))
    record = {"class": qualified_class(samples), "samples": count, "hash": crc_of(repr(contents).encode())}
    if part is not samples:
        record |= {"batches": len(part), "order": qualified_class(sampler_of(part))}
    return record


def qualified_class(value: object) -> str:
    """The name of the class of a value, with its module, as a configuration can hold it."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".replace("${", "$ {")
    return shortened(name, _MOST_NAME)
