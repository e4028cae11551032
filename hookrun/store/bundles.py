"""A bundle: the hooks of a run, and every tensor and autoencoder that they need, in a folder that can be handed on.

It is read as a stranger's: by the readers with limits, without following links. Nothing in it runs code, and no path in
it leads out of its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from hookrun.engine.actions.autoencoders import CONFIG, WEIGHTS
from hookrun.engine.actions.values import FileValue, FolderValue, RunFaults, RunValue
from hookrun.engine.keys import HOOKS_FROM
from hookrun.engine.spec import HookSpec, Spec, parse_spec
from hookrun.engine.spec.hook import BundleOrigin
from hookrun.errors import (
    Problem,
    SpecError,
    listed,
    misnamed,
    printable,
    refuse,
    refused_at,
    shortened,
    shown,
    spec_error,
)
from hookrun.store.config.stored import MOST_YAML, read_yaml
from hookrun.store.files import MOST_JSON, StoreError, near, read_inside
from hookrun.store.format import MODEL, STORED_DTYPES
from hookrun.store.manifest import hashed
from hookrun.store.records import (
    MOST_NAME,
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
PICTURE = "picture.svg"
VERSION = 1

MOST_CALLED = 2**26
"""The most elements of a call of the model, which a trial run may have to make."""

_MOST_SITES = 3

_InFolder = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*/\w[\w.-]*$", max_length=MOST_NAME)]
"""The name of a file in a folder of the bundle: FOLDER/FILE."""


class FormRecord(Record):
    """Dtype and shape of a tensor."""

    dtype: Annotated[str, StringConstraints(pattern=f"^({'|'.join(STORED_DTYPES)})$")]
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
    files: those of the folders that hooks name, with their hashes
    call:  of the run's model; None: the run did not say how its model is called
    """

    version: Literal[1]
    seed: Whole
    hooks: dict[Name, Listing[PlannedMatch]]
    tensors: dict[Name, TensorRecord]
    files: dict[_InFolder, Sha256] = Field(default_factory=dict)
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

    def refuse_names(self, names: Iterable[str]) -> None:
        """Raise SpecError if hooks beside those of the bundle have a name of one of them."""
        what = f"the bundle {self.folder} has a hook of this name, too"
        refuse(
            Problem(f"hooks.{name}", what, "give yours another name") for name in names if name in self.hooks
        )

    def require_content(self) -> None:
        """Read every tensor and file. StoreError unless they are those of model.json, unchanged, and no others."""
        from hookrun.engine.trust.callables import tensor_digest
        from hookrun.store.captures.tensor_file import open_tensors, read_tensor

        path = self.folder / TENSORS
        with open_tensors(path) as file:
            differing = sorted(self.record.tensors.keys() ^ file.keys())
            if differing:
                names = listed(map(printable, differing))
                raise StoreError(f"{path} does not have the tensors of {MODEL}: they differ in {names}")
            for name, record in self.record.tensors.items():
                if tensor_digest(read_tensor(file, name)) != record.sha256:
                    raise StoreError(
                        f"{path}: the tensor {shortened(name)!r} was changed: it is not that of {MODEL}"
                    )
        for name, sha256 in self.record.files.items():
            if hashed(self.folder / name, self.folder)[1] != sha256:
                raise StoreError(f"{self.folder / shortened(name)} was changed: it is not that of {MODEL}")


def read_bundle(named: str | PathLike[str], where: str = "", *, whole: bool = False) -> Bundle:
    """The bundle in a folder.

    where: the key that names it, for errors
    whole: its tensors are compared with their hashes

    Raises SpecError that lists what is wrong in its hooks, or says what is wrong with its files.
    """
    folder = Path(expanduser(named))
    hint = f"a bundle is a folder that `python -m hookrun.bundle RUN OUT` wrote{near(folder, f'*/{HOOKS}')}"
    with refused_at(where or str(folder), hint):
        bundle = _read(folder)
        if whole:
            bundle.require_content()
        return bundle


def with_bundle(config: Mapping[str, Any], seed: int = 0) -> Spec:
    """The hooks of a mapping as `parse_spec` reads it, behind those of the bundle that its key `hooks_from` names."""
    named = config.get(HOOKS_FROM) if isinstance(config, Mapping) else None
    if named is None:
        return parse_spec(config, seed)
    if not isinstance(named, str | Path):
        raise spec_error(HOOKS_FROM, f"found {shown(named)}, expected the folder of one bundle")
    bundle = read_bundle(named, HOOKS_FROM, whole=True)
    hooks = config.get("hooks") or {}
    if isinstance(hooks, Mapping):
        bundle.refuse_names(hooks)
        hooks = {**bundle.hooks, **hooks}
    return replace(parse_spec({**config, "hooks": hooks}, seed), bundle=bundle.spec.bundle)


def _read(folder: Path) -> Bundle:
    if "${" in str(folder):
        raise StoreError("the path has an interpolation, `${`: write it out")
    record = typed_record(folder / MODEL, BundleRecord)
    content = read_yaml(folder / HOOKS, folder)
    if not isinstance(content, dict) or content.keys() != {"hooks"}:
        raise StoreError(
            f"{folder / HOOKS} is not the file of a bundle: it has the key `hooks` and no other one"
        )
    if "${" in str(content):
        raise StoreError(
            f"{folder / HOOKS} has an interpolation, and a bundle refers to nothing outside: write the value"
        )
    try:
        spec = parse_spec(content, record.seed)
        refuse(problem for hook in spec.hooks for problem in _leading_out(hook, record))
    except SpecError as error:
        problems = [problem.moved(f"{folder / HOOKS}: {problem.where}") for problem in error.errors]
        raise SpecError(problems, error.notes) from error
    if not spec.hooks:
        raise StoreError(f"{folder / HOOKS} has no hooks")
    _place_values(content["hooks"], spec, folder)
    origin = BundleOrigin(
        path=str(folder),
        sha256=_digest(folder),
        model=shortened(record.type or ""),
        sites={hook.name: _sites_text(record.hooks.get(hook.name, [])) for hook in spec.hooks},
        call=None if record.call is None else record.call.model_dump(),
    )
    placed = replace(parse_spec(content, record.seed), bundle=origin)
    return Bundle(folder, content["hooks"], placed, record)


def _place_values(hooks: dict[str, Any], spec: Spec, folder: Path) -> None:
    """Write where the files of the bundle are into the values of its hooks."""
    for hook in spec.hooks:
        body = hooks[hook.name]
        for key, value in hook.action.outside_values().items():
            if isinstance(value, FileValue):
                body[key]["file"] = str(folder / TENSORS)
            elif isinstance(value, FolderValue):
                body[key]["folder"] = str(folder / value.folder)


def _leading_out(hook: HookSpec, record: BundleRecord) -> Iterator[Problem]:
    """A problem for each function, run and file that the hook names, except tensors of the bundle."""
    hint = f"a bundle has values in {TENSORS} only, and nothing in it runs code"
    for key in hook.action.own_functions():
        yield Problem(f"{hook.where}.{key}", "names a function", hint)
    for key, value in hook.action.outside_values().items():
        where = f"{hook.where}.{key}"
        match value:
            case RunValue() | RunFaults():
                yield Problem(where, f"names the run {shortened(value.run)!r}", hint)
            case FileValue() if value.file != TENSORS:
                yield Problem(where, f"names the file {shortened(value.file)!r}", hint)
            case FileValue() if value.minus is not None:
                yield Problem(f"{where}.minus", "names another value: store the difference", hint)
            case FileValue() if not value.is_by_module and value.key not in record.tensors:
                what = f"found the key {shortened(str(value.key))!r}, which is not a tensor of {MODEL}"
                yield misnamed(where, what, str(value.key), record.tensors)
            case FolderValue() if not folder_files(value.folder) <= record.files.keys():
                what = f"names the folder {shortened(value.folder)!r}, which {MODEL} does not"
                yield Problem(where, what, hint)


def folder_files(name: str) -> set[str]:
    """The files of a folder of the bundle that a hook names."""
    return {f"{name}/{CONFIG}", f"{name}/{WEIGHTS}"}


def _sites_text(sites: list[PlannedMatch]) -> str:
    texts = [f"{site.path or '(root)'} ({site.type}, {site.shape or 'shape not known'})" for site in sites]
    return listed(map(shortened, texts), _MOST_SITES)


def _digest(folder: Path) -> str:
    """SHA-256 of the hooks and of model.json, which has the hash of each tensor."""
    digest = hashlib.sha256()
    for name, limit in ((HOOKS, MOST_YAML), (MODEL, MOST_JSON)):
        digest.update(hashlib.sha256(read_inside(folder / name, limit=limit)).digest())
    return digest.hexdigest()


def form_of(tensor: Tensor, *, hashed: bool = False) -> dict[str, Any]:
    """Dtype, shape and, if it is wanted, the hash of a tensor, as in model.json."""
    from hookrun.engine.trust.callables import tensor_digest

    form = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return form | {"sha256": tensor_digest(tensor)} if hashed else form
