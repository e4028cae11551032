"""A model's constructor and its arguments: which of them the data set supplies, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, create_model

from hookrun.engine.validation import parse
from hookrun.errors import Problem, reason, refused_at, spec_error

if TYPE_CHECKING:
    from torch import nn

# A width or a number of channels, for the signatures of hookrun's own models.
Size = Annotated[int, Field(ge=1, le=2**20, strict=True)]

# Arguments that a data set can supply. For these, null in a model's section means the data set's value.
FROM_DATA = ("num_classes", "in_features", "in_channels", "image_size", "vocab_size", "length")


@dataclass(frozen=True, slots=True)
class DataDefaults:
    """What a data set supplies to a model.

    shape:       of one sample, without the batch; -1 for a size that differs between samples; None: unknown
    num_classes: None: unknown
    vocab_size:  of token ids; None: its samples are not of tokens
    length:      the largest number of tokens in a sample; None: its samples are not of tokens
    """

    shape: tuple[int, ...] | None
    num_classes: int | None
    vocab_size: int | None = None
    length: int | None = None

    def values(self) -> dict[str, Any]:
        """The arguments that the data set supplies, by name; all of them are in `FROM_DATA`."""
        supplied: dict[str, Any] = {
            "num_classes": self.num_classes,
            "vocab_size": self.vocab_size,
            "length": self.length,
        }
        if self.shape is not None and -1 not in self.shape:
            supplied["in_features"] = math.prod(self.shape)
        if self.shape is not None and len(self.shape) == 3:
            channels, *size = self.shape
            supplied["in_channels"] = None if channels == -1 else channels
            supplied["image_size"] = None if -1 in size else tuple(size)
        return {name: value for name, value in supplied.items() if value is not None}

    def lack(self, name: str) -> str:
        """Why the data set does not supply the argument `name`; empty if no data set supplies it."""
        if name not in FROM_DATA:
            return ""
        if name == "num_classes":
            return "the data set names no number of classes"
        if name in ("vocab_size", "length"):
            return "the data set's samples are not of tokens"
        shape = "no known shape" if self.shape is None else f"the shape {list(self.shape)}"
        return f"the data set's samples have {shape}"


def not_null(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not null; the others come from the data set."""
    return {name: value for name, value in args.items() if value is not None or name not in FROM_DATA}


def checked(model: type[nn.Module], args: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The arguments, validated and converted by the annotations of the constructor, and problems of invalid ones.

    Only for hookrun's own models, which have suitable annotations.
    """
    hints = get_type_hints(model.__init__, include_extras=True)
    fields: dict[str, Any] = {name: (hints[name], ...) for name in args}
    schema = create_model(model.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    validated, problems = parse(schema, args, "model.args")
    return dict(validated or {}), problems


def too_large(build: Callable[[], nn.Module]) -> str | None:
    """Why the parameters of the model do not fit into the memory of this machine; None if they do.

    The model is built on the meta device for this.
    """
    import torch

    with torch.device("meta"):
        model = build()
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    free = _free_memory()
    if free is None or bytes_ <= free:
        return None
    return f"its parameters take {bytes_ / 2**30:,.0f} GiB, and {free / 2**30:,.0f} GiB of memory are free"


def _free_memory() -> int | None:
    """Bytes of memory that are free or can be freed; None if the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def construct(build: partial[Any], model: str) -> nn.Module:
    """The module of a constructor with its arguments. Raises SpecError with the constructor's own error."""
    from torch import nn

    given = ", ".join(f"{name}={value!r}" for name, value in build.keywords.items())
    what = f"'{model}' cannot be built with ({given}): "
    # a constructor may raise anything; its arguments are the cause
    with refused_at("model.args", "correct the arguments", kinds=Exception, what=what, tell=reason):
        built = build()
    if not isinstance(built, nn.Module):
        raise spec_error(
            "model.factory",
            f"'{model}' returned {type(built).__qualname__}, not a torch.nn.Module",
            "name a function or class that returns the module",
        )
    return built


def _position_embeddings(model: nn.Module) -> Iterator[tuple[int, str]]:
    """(number of positions, path) of each embedding of positions, in our decoder and in transformers."""
    from torch import nn

    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and last in (
            "pos_embed",
            "wpe",
            "position_embeddings",
            "embed_positions",
        ):
            yield module.num_embeddings, path


def unfit_tokens(model: nn.Module, vocab_size: int | None, length: int | None) -> Iterator[Problem]:
    """Problems of a model with too few embeddings for `vocab_size` tokens or `length` positions; None: no tokens."""
    if vocab_size is None or length is None:
        return
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(tokens, int) and tokens < vocab_size:
        yield Problem(
            "model.args",
            f"the model has {tokens} tokens, and the data has {vocab_size}",
            "take the tokenizer of the model (data.args.tokenizer), or a model for as many tokens",
        )
    for positions, path in _position_embeddings(model):
        if positions < length:
            yield Problem(
                "model.args",
                f"the model has {positions} positions ({path}), and samples of the data {length} tokens",
                "shorten the samples, or take a model of more positions",
            )


def positions_of(model: nn.Module) -> tuple[int, str] | None:
    """The largest number of positions, and the module or key that says so; None if it is not known."""
    limits = list(_position_embeddings(model))
    configured = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(configured, int) and configured > 0:
        limits.append((configured, "max_position_embeddings"))
    return min(limits, key=lambda limit: limit[0], default=None)
