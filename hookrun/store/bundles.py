"""A bundle: the hooks of a run, and every tensor that they need, in a folder that can be handed on.

It is read as a stranger's: by the readers with limits, without following links. Nothing in it runs code, and no path in
it leads out of its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from hookrun.engine.actions.values import FileValue, RunFaults, RunValue, parts_of
from hookrun.engine.spec import HookSpec, Spec, parse_spec
from hookrun.engine.spec.hook import BundleOrigin
from hookrun.errors import Problem, SpecError, listed, misnamed, printable, refuse, refused_at, shortened
from hookrun.store.config.stored import MOST_YAML, read_yaml
from hookrun.store.files import MOST_JSON, StoreError, read_inside
from hookrun.store.format import MODEL, STORED_DTYPES
from hookrun.store.records import (
    Count,
    Listing,
    ModelRecord,
    Name,
    PlannedMatch,
    Record,
    Sha256,
    Whole,
    typed_record,
)

if TYPE_CHECKING:
    from torch import Tensor

HOOKS = "hooks.yaml"
TENSORS = "tensors.safetensors"
CARD = "README.md"
VERSION = 1

MOST_CALLED = 2**26
"""The most elements of a call of the model, which a trial run may have to make."""

_MOST_SITES = 3


def _storable(dtype: str) -> str:
    if dtype not in STORED_DTYPES:
        raise ValueError(
            f"found the dtype {shortened(dtype)!r}, expected one that a safetensors file can hold"
        )
    return dtype


class FormRecord(Record):
    """Dtype and shape of a tensor."""

    dtype: Annotated[str, AfterValidator(_storable)]
    shape: Listing[Count]


class TensorRecord(FormRecord):
    """A tensor of the bundle; the hash is of dtype, shape and elements."""

    sha256: Sha256


class CallRecord(Record):
    """The tensors of a call of the model, positional and by name."""

    args: Listing[FormRecord]
    kwargs: dict[Name, FormRecord]

    @model_validator(mode="after")
    def _is_small(self) -> CallRecord:
        sizes = [prod(form.shape) for form in (*self.args, *self.kwargs.values())]
        if sum(sizes) > MOST_CALLED:
            raise ValueError(f"the call has {sum(sizes):,} elements, expected at most {MOST_CALLED:,}")
        return self


class BundleRecord(ModelRecord):
    """model.json: what the hooks fit, and the tensors that they need.

    hooks: hook -> the modules or parameters where it was
    call:  of the run's model; None: the run did not say how its model is called
    """

    version: Literal[1]
    seed: Whole
    hooks: dict[Name, Listing[PlannedMatch]]
    tensors: dict[Name, TensorRecord]
    call: CallRecord | None = None


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been read and checked, but for the content of its tensors.

    folder: as it was named
    hooks:  name -> hook as in a configuration, whose values name the bundle's file of tensors
    spec:   the same, validated
    """

    folder: Path
    hooks: dict[str, Any]
    spec: Spec
    record: BundleRecord

    @property
    def origin(self) -> BundleOrigin:
        """What a spec with its hooks says of it."""
        assert self.spec.bundle is not None
        return self.spec.bundle

    def refuse_names(self, names: Iterable[str]) -> None:
        """Raise SpecError if hooks beside those of the bundle have a name of one of them."""
        what = f"the bundle {self.folder} has a hook of this name, too"
        refuse(
            Problem(f"hooks.{name}", what, "give yours another name") for name in names if name in self.hooks
        )

    def require_tensors(self) -> None:
        """Read every tensor. StoreError unless the file has those of model.json, unchanged, and no others."""
        from hookrun.engine.trust.callables import tensor_digest
        from hookrun.store.captures.tensor_file import open_tensors, read_tensor

        path = self.folder / TENSORS
        with open_tensors(path) as file:
            names = set(file.keys())
            for name, record in self.record.tensors.items():
                if name not in names:
                    raise StoreError(f"{path} lacks the tensor {shortened(name)!r}, which {MODEL} names")
                if tensor_digest(read_tensor(file, name)) != record.sha256:
                    raise StoreError(
                        f"{path}: the tensor {shortened(name)!r} was changed: it is not that of {MODEL}"
                    )
            strange = sorted(names - self.record.tensors.keys())
            if strange:
                raise StoreError(
                    f"{path} has tensors that {MODEL} does not name: {listed(map(printable, strange))}"
                )


def read_bundle(named: str | PathLike[str], where: str = "") -> Bundle:
    """The bundle in a folder; its tensors are not read, see `require_tensors`.

    where: the key that names it, for errors

    Raises SpecError that lists what is wrong in its hooks, or says what is wrong with its files.
    """
    folder = Path(named).expanduser()
    with refused_at(
        where or str(folder), "a bundle is a folder that `python -m hookrun.bundle RUN OUT` wrote"
    ):
        return _read(folder)


def _read(folder: Path) -> Bundle:
    if "${" in str(folder):
        raise StoreError("the folder has `${`, an interpolation in a configuration, in its name")
    record = typed_record(folder / MODEL, BundleRecord)
    content = read_yaml(folder / HOOKS, folder)
    if not isinstance(content, dict) or content.keys() != {"hooks"}:
        raise StoreError(
            f"{folder / HOOKS} is not the file of a bundle: it has the key `hooks` and no other one"
        )
    try:
        refuse(_interpolations(content["hooks"], "hooks"))
        spec = parse_spec(content, record.seed)
        refuse(problem for hook in spec.hooks for problem in _leading_out(hook, record))
    except SpecError as error:
        problems = [problem.moved(f"{folder / HOOKS}: {problem.where}") for problem in error.errors]
        raise SpecError(problems, error.notes) from error
    for hook in spec.hooks:
        _name_file(content["hooks"][hook.name], hook, str(folder / TENSORS))
    origin = BundleOrigin(
        path=str(folder),
        sha256=_digest(folder),
        model=record.type or "",
        sites={hook.name: _sites_text(record.hooks.get(hook.name, [])) for hook in spec.hooks},
        call=None if record.call is None else _call(record.call),
    )
    placed = parse_spec(content, record.seed)
    return Bundle(folder, content["hooks"], Spec(placed.hooks, record.seed, origin), record)


def _interpolations(value: Any, where: str) -> Iterator[Problem]:
    """A problem for each text that a configuration would resolve."""
    match value:
        case dict():
            for key, member in value.items():
                yield from _interpolations(str(key), where)
                yield from _interpolations(member, f"{where}.{key}")
        case list():
            for member in value:
                yield from _interpolations(member, where)
        case str() if "${" in value:
            yield Problem(
                where,
                "has an interpolation, and the hooks of a bundle refer to nothing outside",
                "write the value",
            )


def _leading_out(hook: HookSpec, record: BundleRecord) -> Iterator[Problem]:
    """A problem for each function, run and file that the hook names, except tensors of the bundle."""
    for key in hook.action.own_functions():
        what = "names a function, and nothing in a bundle runs code"
        yield Problem(f"{hook.where}.{key}", what, "leave the hook out of the bundle")
    for key, value in hook.action.outside_values().items():
        for part in parts_of(value):
            where = f"{hook.where}.{key}"
            if isinstance(part, RunValue | RunFaults):
                what = f"names the run {shortened(part.run)!r}, and a bundle has its own copy of each value"
                yield Problem(where, what, f"write the value into {TENSORS}")
            elif isinstance(part, FileValue) and part.file != TENSORS:
                what = f"names the file {shortened(part.file)!r}, and a bundle has the file {TENSORS} only"
                yield Problem(where, what, f"write the value into {TENSORS}")
            elif isinstance(part, FileValue) and not part.is_by_module and part.key not in record.tensors:
                what = f"found the key {shortened(str(part.key))!r}, which is not a tensor of {MODEL}"
                yield misnamed(where, what, str(part.key), record.tensors)


def _name_file(body: dict[str, Any], hook: HookSpec, path: str) -> None:
    """Write the path of the bundle's file of tensors into the values of a hook, as in a configuration."""
    for key, value in hook.action.outside_values().items():
        part = body[key] if isinstance(value, FileValue) else None
        while isinstance(part, dict):
            if "file" in part:
                part["file"] = path
            part = part.get("minus")


def _sites_text(sites: list[PlannedMatch]) -> str:
    texts = [f"{site.path or '(root)'} ({site.type}, {site.shape or 'shape not known'})" for site in sites]
    return listed(map(shortened, texts), _MOST_SITES)


def _call(record: CallRecord) -> tuple[list[Any], dict[str, Any]]:
    args = [(form.dtype, tuple(form.shape)) for form in record.args]
    return args, {name: (form.dtype, tuple(form.shape)) for name, form in record.kwargs.items()}


def _digest(folder: Path) -> str:
    """SHA-256 of the hooks and of model.json, which has the hash of each tensor."""
    digest = hashlib.sha256()
    for name, limit in ((HOOKS, MOST_YAML), (MODEL, MOST_JSON)):
        digest.update(hashlib.sha256(read_inside(folder / name, limit=limit)).digest())
    return digest.hexdigest()


def form_of(tensor: Tensor) -> dict[str, Any]:
    """Dtype and shape, as in model.json."""
    from hookrun.store.captures.tensor_file import dtype_name

    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Name -> dtype, shape and hash of each tensor, as in model.json."""
    from hookrun.engine.trust.callables import tensor_digest

    return {name: {**form_of(tensor), "sha256": tensor_digest(tensor)} for name, tensor in tensors.items()}
