"""torchvision's models by name: their arguments, and the weights that torchvision publishes for them."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, get_type_hints
from urllib.parse import urlsplit

from hookrun.engine.validation import unknown_arguments
from hookrun.errors import Mistakes, nearest, reason, spec_error
from hookrun.models.arguments import DataDefaults, not_null
from hookrun.models.weights import is_path

if TYPE_CHECKING:
    from torch import nn
    from torchvision.models import WeightsEnum

    from hookrun.models.settings import Model

_OURS = {"self", "weights", "progress"}  # parameters that an experiment does not set


def names() -> tuple[str, ...]:
    """Every model in torchvision's registry; imports torchvision."""
    from torchvision.models import list_models

    return tuple(list_models())


def prepare(config: Model, data: DataDefaults) -> functools.partial[Any]:
    """The builder of `config.name` with its arguments. Raises SpecError for unknown arguments and weights.

    `num_classes` comes from the data unless it is given or published weights, which have their own, are asked for.
    """
    from torchvision.models import get_model_builder

    builder = get_model_builder(config.name)
    accepted = _accepted(builder)
    published = None if config.own_weights is None or is_path(config.own_weights) else config.own_weights
    args = not_null(config.args)
    mistakes = Mistakes()
    mistakes.add(unknown_arguments(args, accepted, "model.args", config.name))
    if data.num_classes is not None and "num_classes" in accepted and not published:
        args.setdefault("num_classes", data.num_classes)
    if "weights_backbone" in accepted:
        args.setdefault(
            "weights_backbone", None
        )  # by default torchvision downloads some even if `weights` is null
    if published is None:
        if "init_weights" in accepted:
            args.setdefault("init_weights", True)  # the default; two models warn unless it is given
    else:
        builder = functools.partial(_pretrained, builder, mistakes.tried(_member, config.name, published))
    mistakes.refuse()
    return functools.partial(builder, **args)


def _accepted(builder: Callable[..., nn.Module]) -> set[str]:
    """The names of the builder's arguments and of those of the model class and its bases, to which it passes them on.

    Some of these classes ignore unknown keywords; here one is a mistake. Arguments that the builder sets itself
    (`layers` of a resnet) are among the names: torchvision raises an error when one is given.
    """
    from torch import nn

    classes = itertools.takewhile(lambda cls: cls is not nn.Module, get_type_hints(builder)["return"].__mro__)
    names = set[str]()
    for function in (builder, *(cls.__init__ for cls in classes)):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names.add(name)
    return names - _OURS


def _member(model: str, weights: str) -> WeightsEnum:
    """The published weights called `IMAGENET1K_V1`, `DEFAULT` or `ResNet18_Weights.IMAGENET1K_V1`, or SpecError."""
    from torchvision.models import get_model_weights

    enum: Any = get_model_weights(model)
    prefix, dot, name = weights.rpartition(".")
    if name in enum.__members__ and prefix in ("", enum.__name__):
        return enum[name]
    wanted = weights if dot and prefix != enum.__name__ else name
    options = list(enum.__members__)
    if dot:
        options += [f"{enum.__name__}.{member}" for member in enum.__members__]
    raise spec_error(
        "model.weights",
        f"torchvision publishes no weights '{weights}' for {model}; {nearest(wanted, options)}",
        "correct the name, or give a path; a path has a separator in it, or ends in .safetensors, .pt, .ckpt or .bin",
    )


def _pretrained(builder: Callable[..., nn.Module], member: WeightsEnum, **args: Any) -> nn.Module:
    """The model with its published weights: torchvision itself checks the arguments against the weights."""
    import torch

    # torchvision unpickles its files without `weights_only=True`; this variable of torch adds it.
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        return builder(weights=member, **args)
    except (
        TypeError,
        ValueError,
    ):  # about the arguments, such as a num_classes that is not that of the weights
        raise
    except Exception as error:  # no network, a full disk, or a damaged file
        file = PurePosixPath(urlsplit(member.url).path).name
        path = os.path.join(torch.hub.get_dir(), "checkpoints", file)
        state = "could not be used" if os.path.exists(path) else "is not there, and could not be downloaded"
        raise spec_error(
            "model.weights",
            f"the weights {member} were looked for in {os.path.abspath(path)}, which {state}: {reason(error)}",
            (
                f"fetch {member.url} on a machine with a network and copy it to that path (the environment variable "
                "TORCH_HOME moves the folder), or give the path of a state dict as model.weights"
            ),
        ) from error
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before
