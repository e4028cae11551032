"""Weights from a file: a state dict in safetensors or torch format, checked against the model and loaded into it."""

from __future__ import annotations

import difflib
import json
import mmap
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.engine.keys import GIVEN
from hookrun.errors import MOST_COMPARED, Problem, listed, nearest, reason, refuse, refused_at, spec_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hookrun.models.settings import Model

RANDOM = "random"
"""The origin of weights that the model's constructor initializes."""

_INDEX = ".index.json"
"""The end of the name of a file that says which tensor is in which of the files beside it."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", _INDEX)
_EITHER = f"{', '.join(SUFFIXES[:-1])} or {_INDEX}"
_WRAPPERS = ("state_dict", "model")  # keys under which a training script's file holds the state dict
_PREFIX = "module."  # left by DataParallel and DistributedDataParallel
_SHOWN = 10  # names in an error, before "and 3 more"
_WHERE = "model.weights"
_STRIPS = "model.strip_prefix"
_ALLOCATES = re.compile(rb"\n(bytearray|_rebuild_device_tensor_\w+)\n")
"""What torch lets a pickle call though it fills memory."""


def is_path(weights: str) -> bool:
    """Whether `model.weights` is a path, by its suffix or a separator in it, and not a name."""
    return weights.endswith(SUFFIXES) or "/" in weights or os.sep in weights


def origin(config: Model) -> str:
    """Where the weights of the model come from: ``random``, the name of published weights, or a path."""
    if config.name == GIVEN:
        from hookrun.models.given import origin_of_lent

        return origin_of_lent()
    weights = config.own_weights
    if weights is not None:
        return str(_absolute(weights).resolve()) if is_path(weights) else weights
    if config.factory is not None:
        return f"as {config.factory} makes them"
    if config.args.get("path") is not None:
        folder = Path(str(config.args["path"])).expanduser().absolute()
        return str(folder.resolve()) if folder.is_dir() else str(config.args["path"])
    backbone = config.args.get("weights_backbone")
    return RANDOM if backbone is None else f"{RANDOM}, with those of the backbone from {backbone}"


def require_weights(config: Model, *, published: bool) -> None:
    """Raises SpecError if `model.weights` is not a file that can be read; nothing of it is read.

    published: whether the model may have published weights, which are given by name
    """
    if config.strip_prefix is not None and not is_path(config.own_weights or ""):
        raise spec_error(_STRIPS, "is for the names in a file, and model.weights is not one", "leave it out")
    if config.own_weights is None or (published and not is_path(config.own_weights)):
        return
    if not is_path(config.own_weights):
        raise spec_error(
            _WHERE,
            f"'{config.own_weights}' is not a path, and no weights are published under a name for '{config.name}'",
            f"give the path of a {_EITHER} file, or null",
        )
    path = _absolute(config.own_weights)
    if not path.name.endswith(SUFFIXES):
        hint = "save the state dict in one of these formats"
        raise spec_error(_WHERE, f"{path} is not a {_EITHER} file", hint)
    if not path.is_file():
        what = f"there is no file {path}, and no folder {path.parent}"
        if path.parent.is_dir():
            beside = nearest(path.name, [p.name for p in path.parent.iterdir() if p.name.endswith(SUFFIXES)])
            what = f"there is no file {path}; beside it {beside}"
        hint = "correct the path; a relative one starts at the current directory"
        if path.parent.name == "checkpoints":
            hint += "; a run keeps what its train.checkpoint.save says (a job of a sweep: best)"
        raise spec_error(_WHERE, what, hint)


def load_weights(model: nn.Module, weights: str, strip_prefix: str | None = None) -> dict[str, Tensor]:
    """Load the file `weights` into `model` and return what is left over.

    strip_prefix: removed from the names in the file that begin with it

    The left-over tensors are those whose names the model does not have; hooks may add parameters of these names.
    For the name of published weights nothing is done, because `build` has already loaded those.

    Raises SpecError if the file is damaged, contains Python objects instead of tensors, does not have all
    tensors of the model, or has them in another shape or of another kind; the model is then unchanged.
    """
    if not is_path(weights):
        return {}
    path = _absolute(weights)
    state = read_weights(path, strip_prefix)
    tensors = model.state_dict(keep_vars=True)
    refuse([*_missing(tensors, state, path), *_mismatched(tensors, state, path)])
    model.load_state_dict({name: state[name] for name in tensors if name in state}, strict=False)
    return {name: tensor for name, tensor in state.items() if name not in tensors}


def applied_hooks(weights: str) -> frozenset[str]:
    """The identities of the hooks that had changed the model when hookrun wrote the file, from its metadata."""
    if not weights.endswith(".safetensors"):
        return frozenset()
    from safetensors import safe_open

    with safe_open(_absolute(weights), framework="pt") as file:
        applied = (file.metadata() or {}).get("applied", "[]")
    names = None
    what = f"{_absolute(weights)} has metadata that is nested too deeply: "
    with (
        refused_at(_WHERE, "save the state dict again", kinds=RecursionError, what=what),
        suppress(ValueError),
    ):
        names = json.loads(applied)  # or another program's key of that name
    if not isinstance(names, list):
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str))


def _absolute(weights: str) -> Path:
    return Path(weights).expanduser().absolute()


def read_weights(path: Path, strip_prefix: str | None = None, where: str = _WHERE) -> dict[str, Tensor]:
    """The tensors of a file, or of those of an index, by name, on the CPU, without the wrapping of training scripts.

    strip_prefix: see `load_weights`
    where:        the key path of the file

    Raises SpecError for anything but tensors; no code of a file runs, and it takes little more memory than its size.
    """
    state: dict[str, Tensor] = {}
    if path.name.endswith(_INDEX):
        what = f"{path} could not be read as an index of files beside it: "
        with refused_at(where, "give one that transformers saved", kinds=Exception, what=what, tell=reason):
            index = json.loads(path.read_text(encoding="utf-8"))
            for name in sorted(set(index["weight_map"].values())):
                part = path.parent / Path(name).name
                if not part.is_file():
                    what = f"there is no file {part}, which {path.name} names"
                    raise spec_error(where, what, "put all files of the checkpoint into one folder")
                state |= _tensors(part, where)
    else:
        state = _tensors(path, where)
    if strip_prefix is None and state and all(name.startswith(_PREFIX) for name in state):
        strip_prefix = _PREFIX
    return state if strip_prefix is None else _stripped(state, strip_prefix, path)


def _tensors(path: Path, where: str) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    hint = (
        "save model.state_dict() again, best as .safetensors; of a checkpoint that you trust it is "
        "torch.load(FILE, weights_only=False)['state_dict']. Other objects are never unpickled"
    )
    what = f"{path} could not be read as tensors alone: "
    # a damaged file may raise anything; a refused object raises an UnpicklingError
    with refused_at(where, hint, kinds=Exception, what=what, tell=_why_refused):
        if path.suffix == ".safetensors":
            state: Any = load_file(path, device="cpu")
        else:
            _require_bounded(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    for key in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping):
        what = f"{path} holds {type(state).__qualname__}, not a state dict"
        raise spec_error(where, what, "save model.state_dict()")
    others: list[str] = []
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            others.append(str(name))
    if others:
        count = _count(others, len(state), "entry", "entries")
        what = f"{path} holds {count} that are not tensors: {listed(others, _SHOWN)}"
        raise spec_error(where, what, "save model.state_dict()")
    if special := [name for name, value in state.items() if not _is_plain(value)]:
        raise spec_error(
            where,
            f"{path} holds {_count(special, len(state), 'tensor', 'tensors')} that are quantized, sparse, nested or "
            f"without values (meta), or repeat them (expand): {listed(special, _SHOWN)}",
            "save a state dict of plain tensors: dequantize(), to_dense(), clone(), and those of a model with values",
        )
    return dict(state)


def _require_bounded(path: Path) -> None:
    """Raises ValueError for a pickle that may take much more memory than its file has bytes."""
    if zipfile.is_zipfile(path):  # else a pickle, as old versions of torch have written it
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        size = sum(part.file_size for part in parts)
        if size > path.stat().st_size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("its parts are compressed, or overlap")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if (call := _ALLOCATES.search(content)) is not None:
            raise ValueError(f"it holds a {call[1].decode()}, which may be of any size")


def _why_refused(error: BaseException) -> str:
    """The object that torch refuses to unpickle, whose advice is to trust the file; else the exception's own line."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    return reason(error) if refused is None else f"it holds a {refused[1]}, which would run code"


def _stripped(state: Mapping[str, Tensor], prefix: str, path: Path) -> dict[str, Tensor]:
    """The tensors by their names without the prefix. Raises SpecError if no name has it, or two become the same."""
    prefixes = set[str]()
    for name in state:
        prefixes.update(name[: dot.end()] for dot in re.finditer(r"\.", name))
    if prefix not in prefixes:
        what = f"no name in {path} begins with {prefix!r}; {nearest(prefix, prefixes)}"
        raise spec_error(_STRIPS, what, "correct it")
    if any(prefix + name in state for name in state):
        raise spec_error(_STRIPS, f"{path} has a name both with and without {prefix!r}", "leave it out")
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _missing(model: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> list[Problem]:
    """Problems of the model's tensors that are not in the file; of a tied tensor only one name is needed."""
    loaded = {id(tensor) for name, tensor in model.items() if name in state}
    lacking = [name for name, tensor in model.items() if name not in state and id(tensor) not in loaded]
    if not lacking:
        return []
    for longer in state:
        prefix = longer.removesuffix(lacking[0])
        if longer.endswith(f".{lacking[0]}") and all(prefix + name in state for name in lacking):
            what = f"names in {path} begin with {prefix!r}, those of the model do not: {longer!r}"
            return [Problem(_WHERE, what, f"set {_STRIPS}={prefix}")]
    unused = [name for name in state if name not in model]
    shown = [f"'{name}'{_close(name, unused[:MOST_COMPARED])}" for name in lacking[:_SHOWN]]
    shown += lacking[_SHOWN:]
    count = _count(lacking, len(model), "tensor", "tensors")
    what = f"{path} lacks {count} of the model: {listed(shown, _SHOWN)}"
    hint = "take the file of this model, or rename the tensors in it"
    if unused:
        hint += f"; it has {len(unused)} that the model does not have: {listed(map(repr, unused), _SHOWN)}"
    return [Problem(_WHERE, what, hint)]


def _mismatched(model: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> list[Problem]:
    """Problems of tensors of another shape or kind; a lazy module's tensor takes the shape in the file."""
    from torch.nn.parameter import is_lazy

    shapes: list[str] = []
    kinds: list[str] = []
    for name, tensor in model.items():
        if name not in state:
            continue
        stored = state[name]
        if not is_lazy(tensor) and stored.shape != tensor.shape:
            shapes.append(
                f"'{name}' is {list(stored.shape)} in the file and {list(tensor.shape)} in the model"
            )
        if change := change_of(stored, tensor):
            kinds.append(f"'{name}' is {change}")
    hint = "take the file of this model, or give model.args the sizes of the file's"
    return [
        *differing(path, "in another shape", shapes, len(model), hint),
        *differing(path, "of another kind", kinds, len(model), SCALES),
    ]


SCALES = "a quantized file needs its scales: save the weights as floating point"
"""The hint for weights that are another kind of number than the model's."""


def differing(path: Path | str, how: str, names: Sequence[str], total: int, hint: str) -> list[Problem]:
    """The problem of the tensors of the file that differ from the model's, which has `total`, if there are any."""
    if not names:
        return []
    what = f"{path} has {_count(names, total, 'tensor', 'tensors')} {how}: {listed(names, _SHOWN)}"
    return [Problem(_WHERE, what, hint)]


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number: values of one kind can be converted to another dtype of that kind, rounded.

    8-bit floating point is a kind of its own, because such weights have scales beside them.
    """
    if dtype.is_floating_point:
        return "floating point" if dtype.itemsize > 1 else "scaled"
    return "complex" if dtype.is_complex else "integer"


def change_of(stored: Tensor, tensor: Tensor) -> str:
    """How the values in a file would change in the model's tensor, ``int8 in the file and …``; empty if they fit.

    float16, bfloat16, float32 and float64 fit one another; integers and booleans if the model's dtype holds each value.
    """
    import torch

    fits = kind_of(stored.dtype) == kind_of(tensor.dtype)
    if fits and kind_of(stored.dtype) == "integer" and stored.dtype != tensor.dtype:
        fits = torch.equal(stored.to(tensor.dtype).double(), stored.double())
    if fits:
        return ""
    return f"{stored.dtype} in the file and {tensor.dtype} in the model".replace("torch.", "")


def _is_plain(tensor: Tensor) -> bool:
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.nbytes <= max(tensor.untyped_storage().nbytes(), 2**20)  # a few repeated values do no harm


def _close(name: str, options: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, options, n=1)
    return f" (is it '{match[0]}'?)" if match else ""


def _count(named: Sequence[str], total: int, one: str, many: str) -> str:
    return f"{len(named)} of {total} {one if total == 1 else many}"
