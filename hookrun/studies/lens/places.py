"""Finds the blocks of a decoder, its final norm, its unembedding and the output projections of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookrun.engine.plan.attention_points import HeadwiseProjection
from hookrun.engine.plan.heads import head_count
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.spec.heads import Heads
from hookrun.engine.spec.selector import Selector
from hookrun.engine.validation import join
from hookrun.errors import Mistakes, compile_error, listed, nearest
from hookrun.studies.kit.modules import SEE_MODULES, selected
from hookrun.studies.kit.passes import FromHeads

FINAL_NORMS = (
    *("ln_final", "ln_f", "norm", "final_layer_norm", "final_layernorm", "final_norm", "norm_f"),
    *("layer_norm", "ln_out", "out_norm", "output_norm"),
)
_UNEMBEDS = ("unembed", "lm_head", "embed_out", "output")
_LISTS = ("blocks", "layers", "h", "layer", "decoder_layers")
_PROJECTIONS = ("c_proj", "o_proj", "out_proj", "dense", "wo")
_ATTENTION = ("attn", "attention")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


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

    def is_in(self, module: str) -> bool:
        """Whether the sum over the heads is computed in this module."""
        return self.summed == module or self.summed.startswith(f"{module}.")


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
    names, mistakes = ModelNames(model), Mistakes()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise compile_error(
            "task.name",
            f"{type(model).__name__} is an encoder-decoder, "
            "and the lens reads the residual stream of a decoder",
            "use a causal language model (model.args.class=causal_lm)",
        )
    blocks = mistakes.tried(_blocks, names, residual)
    if final_norm:
        norm = mistakes.tried(_required, names, final_norm, "task.final_norm")
    else:
        norm = mistakes.tried(_final_norm, model, blocks) if blocks else None
    scores = mistakes.tried(_unembed, names, unembed)
    heads_of_blocks: list[HeadsPlace] = []
    if by_head and blocks:
        chosen = mistakes.tried(selected, names, heads, "task.heads") if heads else None
        for block in blocks if chosen or not heads else ():
            place = mistakes.tried(_heads, model, block, chosen)
            if place is not None:
                heads_of_blocks.append(place)
    mistakes.refuse()
    assert blocks and norm and scores
    return Places(tuple(blocks), norm, scores, tuple(heads_of_blocks))


def _required(names: ModelNames, path: str, where: str) -> str:
    if path not in names.modules:
        raise compile_error(
            where, f"the model has no module {path!r}; {nearest(path, names.modules)}", SEE_MODULES
        )
    return path


def _blocks(names: ModelNames, given: Selector | None) -> list[str]:
    """The given blocks, or the children of the outermost ModuleList whose length the config gives as layers.

    Without a config: of the outermost ModuleList with a usual name.
    """
    if given:
        return selected(names, given, "task.residual")
    model = names.model
    config = text_config(model)
    counts = set[int]()
    for name in _LAYERS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            counts.add(value)
    lengths_of: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            fits = len(module) in counts if counts else path.rpartition(".")[2] in _LISTS
            if fits:
                lengths_of[path] = len(module)
    outermost = [path for path in lengths_of if not any(_is_inside(path, other) for other in lengths_of)]
    if len(outermost) == 1:
        return [f"{outermost[0]}.{number}" for number in range(lengths_of[outermost[0]])]
    lengths = listed(map(str, sorted(counts)), 3)
    looked = f"a list of {lengths} modules" if counts else f"a list called {listed(_LISTS, 9)}"
    there = f"found {listed(outermost)}" if outermost else "there is none"
    raise compile_error(
        "task.residual",
        f"the blocks of {type(model).__name__} were not found: looked for {looked}, {there}",
        "name them with a selector: task.residual='model.layers[:]'",
    )


def _is_inside(path: str, other: str) -> bool:
    """Whether a module is inside another one; "" is the model."""
    return path != other and path.startswith(f"{other}." if other else "")


def text_config(model: nn.Module) -> Any:
    """The model's config; for a model of images and text, the config of its text part; None if there is none."""
    config: Any = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _final_norm(model: nn.Module, blocks: list[str]) -> str:
    """The path of the final norm beside the list of the blocks, or in the module around it."""
    owner = blocks[0].rpartition(".")[0].rpartition(".")[0]
    for place in dict.fromkeys([owner, owner.rpartition(".")[0]]):
        there = model.get_submodule(place)._modules
        if norms := [name for name in FINAL_NORMS if there.get(name) is not None]:
            return join(place, norms[0])
    raise compile_error(
        "task.final_norm",
        f"{type(model).__name__} has no final norm beside its blocks in {owner or 'the model'}: looked for "
        f"{listed(FINAL_NORMS, len(FINAL_NORMS))}",
        "the lens is for decoders that have one: name it with task.final_norm=PATH, or use another model",
    )


def _unembed(names: ModelNames, given: str | None) -> str:
    """The path of the layer that computes the logits: the given one, or the model's output embedding."""
    where = "task.unembed"
    path = _path_of_unembed(names.model) if given is None else _required(names, given, where)
    if path is None:
        raise compile_error(
            where,
            f"{type(names.model).__name__} has no output embedding: looked for "
            f"get_output_embeddings() and the modules {listed(_UNEMBEDS, len(_UNEMBEDS))}",
            "the lens is for language models: name the module with task.unembed=PATH, or use another model",
        )
    weight = getattr(names.model.get_submodule(path), "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise compile_error(
            where,
            f"{path} has no weight [vocabulary, width], so it is not an unembedding",
            "name the linear layer that computes the logits",
        )
    return path


def _path_of_unembed(model: nn.Module) -> str | None:
    """The path of the model's output embedding, or of a layer with a usual name; None: it has none."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    layer = getter() if callable(getter) else None
    for name in _UNEMBEDS:
        if layer is None:
            layer = model._modules.get(name)
    for path, module in model.named_modules():
        if module is layer:
            return path
    return None


# ---- heads -----------------------------------------------------------------------------------------------------


def _heads(model: nn.Module, block: str, chosen: list[str] | None) -> HeadsPlace:
    """The output projection of the block's attention: the one that is chosen, or that has a usual name.

    Raises CompileError if there is not exactly one, or it does not take the heads of an attention.
    """
    paths: list[str] = []
    if chosen is not None:
        looked = "one match"
        paths += [path for path in chosen if path.startswith(f"{block}.")]
    else:
        looked = f"a projection in its attention called {listed(_PROJECTIONS, 9)}"
        for path, module in model.get_submodule(block).named_modules():
            owner, _, name = path.rpartition(".")
            in_attention = any(word in owner for word in _ATTENTION)
            if isinstance(module, FromHeads) or (in_attention and name in _PROJECTIONS):
                paths.append(f"{block}.{path}")
    if len(paths) != 1:
        raise compile_error(
            "task.heads",
            f"{block}: looked for {looked}, found {listed(paths) if paths else 'none'}",
            "name one in each block: task.heads='**.attn.o_proj'",
        )
    place = _place(model, paths[0])
    if place is None:
        raise compile_error(
            "task.heads",
            f"{paths[0]} does not take the heads of an attention, or the number of heads is not known",
            "name the output projection of the attention, a Linear",
        )
    return place


def _place(model: nn.Module, path: str) -> HeadsPlace | None:
    module = model.get_submodule(path)
    owner = path.rpartition(".")[0]
    if isinstance(module, FromHeads):  # of hookrun's own attention, with their sum in the module beside it
        return HeadsPlace(path, f"{owner}.out", f"{owner}.out.bias", module.weight.shape[0])
    bias = f"{path}.bias" if getattr(module, "bias", None) is not None else ""
    if isinstance(module, HeadwiseProjection):
        return HeadsPlace(f"{owner}.result", path, bias, module.heads)
    weight = getattr(module, "weight", None)
    counted = head_count(model, path, Heads.model_validate({"pick": [0]}))
    if counted is None or weight is None or weight.dim() != 2:
        return None
    width = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
    count = counted.counts[0]
    if width % count or counted.width not in (None, width // count):
        return None
    return HeadsPlace(path, path, bias, count)
