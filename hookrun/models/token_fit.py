"""Checks that a model has an embedding for each token and position of the data, which shapes do not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookrun.errors import Problem

if TYPE_CHECKING:
    from torch import nn

# The last part of the path of embeddings of positions, in our decoder and in transformers.
_POSITIONS = ("pos_embed", "wpe", "position_embeddings", "embed_positions")


def unfit_tokens(model: nn.Module, vocab_size: int | None, length: int | None) -> list[Problem]:
    """Problems of a model with too few embeddings for `vocab_size` tokens or `length` positions; None: no tokens."""
    from torch import nn

    if vocab_size is None or length is None:
        return []
    problems = list[Problem]()
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(tokens, int) and tokens < vocab_size:
        what = f"the model has {tokens} tokens, and the data has {vocab_size}"
        hint = "take the tokenizer of the model (data.args.tokenizer), or a model for as many tokens"
        problems.append(Problem("model.args", what, hint))
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and last in _POSITIONS and module.num_embeddings < length:
            what = f"the model has {module.num_embeddings} positions ({path}), and samples of the data {length} tokens"
            problems.append(
                Problem("model.args", what, "shorten the samples, or take a model of more positions")
            )
    return problems


def positions_of(model: nn.Module) -> tuple[int, str] | None:
    """The largest number of positions, and the module or key that says so; None if it is not known."""
    from torch import nn

    found = [
        (module.num_embeddings, path)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITIONS
    ]
    told = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(told, int) and told > 0:
        found.append((told, "max_position_embeddings"))
    return min(found, key=lambda each: each[0], default=None)
