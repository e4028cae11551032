"""Finds the blocks of a decoder, its final norm, its unembedding and the output projections of its attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookrun.errors import CompileError, Problem, listed, nearest
from hookrun.models.attention_points import HeadwiseProjection
from hookrun.models.decoder import FromHeads, SumOfHeads
from hookrun.plan.heads import head_count
from hookrun.plan.model_tree import ModelNames
from hookrun.spec.heads import Heads
from hookrun.spec.selector import Selector

FINAL_NORMS = (
    *("ln_final", "ln_f", "norm", "final_layer_norm", "final_layernorm", "final_norm", "norm_f"),
    *("layer_norm", "ln_out", "out_norm", "output_norm"),
)
_UNEMBEDS = ("unembed", "lm_head", "embed_out", "output")
_LISTS = ("blocks", "layers", "h", "layer", "decoder_layers")
_PROJECTIONS = ("c_proj", "o_proj", "out_proj", "dense", "wo")
_ATTENTION = ("attn", "attention")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_SHOWN = 6


@dataclass(frozen=True)
class HeadsPlace:
    """Where the heads of one block's attention are read.

    path:   the module whose input [..., heads * width of a head] or output [..., heads, width] is read
    summed: the path of the module whose output is the sum over the heads, with the bias
    bias:   the parameter name of the projection's bias; "" if it has no bias
    count:  the number of heads
    """

    path: str
    summed: str
    bias: str
    count: int

    @property
    def by_output(self) -> bool:
        """Whether the module's output is read, which holds the contribution of each head."""
        return self.path != self.summed


@dataclass(frozen=True)
class Places:
    """The module paths that the lens reads.

    blocks:     the blocks in the order in which they run
    final_norm: the norm after the last block
    unembed:    the layer from the residual stream to the logits
    heads:      one for each block; empty if heads are not read
    """

    blocks: tuple[str, ...]
    final_norm: str
    unembed: str
    heads: tuple[HeadsPlace, ...] = ()


def find_places(
    model: nn.Module,
    *,
    residual: Selector | None,
    final_norm: str | None,
    unembed: str | None,
    heads: Selector | None,
    by_head: bool,
) -> Places:
    """The given places, and for the others those of a usual decoder. Raises CompileError with all that are not found.

    residual:   selects the blocks; None: search
    final_norm: a module path; None: search
    unembed:    a module path; None: search
    heads:      selects an output projection in each block; None: search
    by_head:    whether the projections are needed
    """
    names, problems = ModelNames(model), list[Problem]()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        what = f"{type(model).__name__} is an encoder-decoder, and the lens reads the residual stream of a decoder"
        raise CompileError(
            [Problem("task.name", what, "use a causal language model (model.args.class=causal_lm)")]
        )
    blocks = _selected(names, residual, "task.residual", problems) if residual else _blocks(model, problems)
    norm = _named(names, final_norm, "task.final_norm", problems) if final_norm else None
    if norm is None and not final_norm:
        norm = _final_norm(model, blocks, problems)
    scores = _named(names, unembed, "task.unembed", problems) if unembed else _unembed(model, problems)
    weight = None if scores is None else getattr(model.get_submodule(scores), "weight", None)
    if scores is not None and (not isinstance(weight, Tensor) or weight.dim() != 2):
        what = f"{scores} has no weight [vocabulary, width], so it is not an unembedding"
        problems.append(Problem("task.unembed", what, "name the linear layer that computes the logits"))
    places = list[HeadsPlace]()
    if by_head and blocks:
        chosen = _selected(names, heads, "task.heads", problems) if heads else None
        places = [each for block in blocks for each in _heads(model, block, chosen, problems)]
    if problems or norm is None or scores is None:
        raise CompileError(problems)
    return Places(tuple(blocks), norm, scores, tuple(places))


def _selected(names: ModelNames, selector: Selector, where: str, problems: list[Problem]) -> list[str]:
    found = list(dict.fromkeys(names.first_name(path) for path in selector.select(names.tree)))
    if not found:
        what = f"{str(selector)!r} matches no module; {names.nearest(selector, on_parameters=False)}"
        problems.append(Problem(where, what, _SEE))
    return found


_SEE = "look at the modules with task=modules"


def _named(names: ModelNames, path: str, where: str, problems: list[Problem]) -> str | None:
    if path in names.modules:
        return path
    problems.append(Problem(where, f"the model has no module {path!r}; {nearest(path, names.modules)}", _SEE))
    return None


def _blocks(model: nn.Module, problems: list[Problem]) -> list[str]:
    """The paths of the blocks: the children of the outermost ModuleList whose length the config gives as layers.

    Without a config: of the outermost ModuleList with a usual name.
    """
    config: Any = getattr(model, "config", None)
    if callable(text := getattr(config, "get_text_config", None)):
        config = text()
    counts = {value for name in _LAYERS if isinstance(value := getattr(config, name, None), int)}
    lists = [
        (path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)
    ]
    fitting = [(path, each) for path, each in lists if len(each) in counts]
    if not counts:
        fitting = [(path, each) for path, each in lists if path.rpartition(".")[2] in _LISTS]
    fitting = [each for each in fitting if not any(_inside(each[0], other) for other, _ in fitting)]
    if len(fitting) == 1:
        path, found = fitting[0]
        return [f"{path}.{number}" for number in range(len(found))]
    looked = (
        f"a list of {listed(map(str, sorted(counts)), 3)} modules"
        if counts
        else f"a list called {listed(_LISTS, 9)}"
    )
    there = f"found {listed([path for path, _ in fitting], _SHOWN)}" if fitting else "there is none"
    what = f"the blocks of {type(model).__name__} were not found: looked for {looked}, {there}"
    problems.append(
        Problem("task.residual", what, "name them with a selector: task.residual='model.layers[:]'")
    )
    return []


def _inside(path: str, other: str) -> bool:
    return path != other and path.startswith(f"{other}." if other else "")


def _final_norm(model: nn.Module, blocks: list[str], problems: list[Problem]) -> str | None:
    """The path of the final norm beside the list of the blocks, or in the module around it."""
    if not blocks:
        return None
    owner = blocks[0].rpartition(".")[0].rpartition(".")[0]
    for place in dict.fromkeys([owner, owner.rpartition(".")[0]]):
        there = model.get_submodule(place)._modules
        found = [name for name in FINAL_NORMS if there.get(name) is not None]
        if found:
            return f"{place}.{found[0]}" if place else found[0]
    what = (
        f"{type(model).__name__} has no final norm beside its blocks in {owner or 'the model'}: looked for "
        f"{listed(FINAL_NORMS, len(FINAL_NORMS))}"
    )
    hint = "the lens is for decoders that have one: name it with task.final_norm=PATH, or use another model"
    problems.append(Problem("task.final_norm", what, hint))
    return None


def _unembed(model: nn.Module, problems: list[Problem]) -> str | None:
    getter = getattr(model, "get_output_embeddings", None)
    found: Any = getter() if callable(getter) else None
    if found is None:
        found = next(filter(None, (model._modules.get(name) for name in _UNEMBEDS)), None)
    for path, each in model.named_modules():
        if each is found:
            return str(path)
    what = (
        f"{type(model).__name__} has no output embedding: looked for get_output_embeddings() and the modules "
        f"{listed(_UNEMBEDS, len(_UNEMBEDS))}"
    )
    hint = "the lens is for language models: name the module with task.unembed=PATH, or use another model"
    problems.append(Problem("task.unembed", what, hint))
    return None


# ---- heads -----------------------------------------------------------------------------------------------------


def _heads(
    model: nn.Module, block: str, chosen: list[str] | None, problems: list[Problem]
) -> Iterator[HeadsPlace]:
    """The output projection of the block's attention; yields nothing if a problem was added."""
    if chosen is None:
        found = list(_projections(model, block))
    else:
        found = [path for path in chosen if path.startswith(f"{block}.")]
    if len(found) != 1:
        asked = (
            "a projection in its attention called " + listed(_PROJECTIONS, 9)
            if chosen is None
            else "one match"
        )
        what = f"{block}: looked for {asked}, found {listed(found, _SHOWN) if found else 'none'}"
        problems.append(Problem("task.heads", what, "name one in each block: task.heads='**.attn.o_proj'"))
        return
    place = _place(model, found[0])
    if place is None:
        what = f"{found[0]} does not take the heads of an attention, or the number of heads is not known"
        problems.append(Problem("task.heads", what, "name the output projection of the attention, a Linear"))
        return
    yield place


def _projections(model: nn.Module, block: str) -> Iterator[str]:
    for path, module in model.get_submodule(block).named_modules():
        owner, _, name = path.rpartition(".")
        in_attention = any(word in owner for word in _ATTENTION)
        if isinstance(module, FromHeads) or (in_attention and name in _PROJECTIONS):
            yield f"{block}.{path}"


def _place(model: nn.Module, path: str) -> HeadsPlace | None:
    module, owner = model.get_submodule(path), path.rpartition(".")[0]
    if isinstance(module, FromHeads):
        around = model.get_submodule(owner).named_children()
        summed = next((name for name, each in around if isinstance(each, SumOfHeads)), None)
        return (
            None
            if summed is None
            else HeadsPlace(path, f"{owner}.{summed}", f"{owner}.{summed}.bias", module.weight.shape[0])
        )
    bias = f"{path}.bias" if getattr(module, "bias", None) is not None else ""
    if isinstance(module, HeadwiseProjection):
        return HeadsPlace(f"{owner}.result", path, bias, module.heads)
    weight = getattr(module, "weight", None)
    counted = head_count(model, path, Heads.model_validate({"pick": [0]}))
    if counted is None or weight is None or weight.dim() != 2:
        return None
    taken = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
    if taken % counted.counts[0] or counted.width not in (None, taken // counted.counts[0]):
        return None
    return HeadsPlace(path, path, bias, counted.counts[0])
