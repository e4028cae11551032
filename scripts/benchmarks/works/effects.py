"""task=effects beside hand-written loops: one whole run with its directory, for all cells of a grid."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import OURS, Result, Settings, Ways, measured
from benchmarks.threads import threads
from benchmarks.works.lm import of_transformers

_COMMON = [
    "task=effects",
    "compute.device=cpu",
    "compute.threads=1",
    "data=repeated_tokens",
    "task.tokens=-2",
]
_GPT2 = [
    "compute.threads=2",
    "model=transformers",
    "~model.args",
    "+model.args={config: {model_type: gpt2, n_layer: 4, vocab_size: 50257}}",
    "data.args={half: [32, 32], val_size: 1}",
    "data.batch_size=1",
    "+hooks.zero={select: 'transformer.h.*.attn.c_proj', hook: forward_pre, action: replace, value: 0}",
    "task.hook=zero",
    "task.over={module: each, heads: each}",
    "task.metric=loss",
]
_TINY = [
    "compute.threads=1",
    "model=decoder",
    "model.args={layers: 4, heads: 2, width: 32}",
    "data.args={half: [6, 6], val_size: 16}",
    "data.batch_size=16",
    "+hooks.zero={select: 'blocks.*.resid_post', hook: forward, action: replace, value: 0}",
    "task.hook=zero",
    "task.over={module: each, tokens: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}",
    "task.metric=loss",
]


class OneRun:
    """A prepared experiment of task=effects; `run` makes a whole run, in a new directory each time."""

    def __init__(self, overrides: list[str]) -> None:
        from hookrun.command.compose.compose import compose_dict
        from hookrun.run import tasks
        from hookrun.run.passes.batches import Batches

        experiment = tasks.parse_experiment(compose_dict([*_COMMON, *overrides]))
        self.ready: Any = tasks.prepare(experiment)
        self.model = self.ready.model.eval()
        (self.batch,) = Batches(self.ready, "val")
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = count()

    def run(self) -> Any:
        """The effects of one run."""
        import hookrun
        from hookrun.run.execute import execute

        place = Path(self._folder.name) / str(next(self._numbers))
        with contextlib.redirect_stdout(io.StringIO()):
            execute(self.ready, place)
        return hookrun.open_run(place).effects

    def loss(self, output: Any) -> Any:
        """[samples]: the loss at the last token but one."""
        from torch.nn import functional

        logits = getattr(output, "logits", output)
        return functional.cross_entropy(logits[:, -2], self.batch.target[:, -2], reduction="none")

    def zeroed(self, names: list[str], places: int, hook: Callable[[int], Any], *, pre: bool = False) -> Any:
        """[modules, places]: the mean loss for each hook by a loop over plain forward passes."""
        import torch

        cells = torch.zeros(len(names), places)
        for row, name in enumerate(names):
            module = self.model.get_submodule(name)
            register = module.register_forward_pre_hook if pre else module.register_forward_hook
            for place in range(places):
                handle = register(hook(place))
                cells[row, place] = self.loss(self.model(**self.batch.inputs)).mean()
                handle.remove()
        return cells


def _of_head(number: int) -> Callable[..., Any]:
    def hook(module: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., 64 * number : 64 * (number + 1)] = 0
        return (x,)

    return hook


def _at_token(number: int) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        output = output.clone()
        output[:, number] = 0
        return output

    return hook


_HEADS, _GRADIENT = (
    "gpt2 of 4 layers, ablate each of 48 heads",
    "gpt2 of 4 layers, estimate 48 heads from the gradient",
)
_CIRCUITS = "gpt2 of 4 layers, 17 tokens, one thread, circuits of 5 sizes beside 20 random sets"
_CELLS = "tiny decoder, ablate 48 tokens of 4 layers"


@of_transformers(_HEADS, 0.35)
def head_ablation(settings: Settings) -> Result:
    """The loss without each head: a forward pass for each by hand, with whole logits, and one run of task=effects."""
    ways, ours = Ways(), OneRun(_GPT2)
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in range(4)]

    def by_hand() -> Any:
        return ours.zeroed(names, 12, _of_head, pre=True)

    ways.add("by hand", by_hand, lambda: {"loss": by_hand()})
    ways.add(OURS, ours.run, lambda: {"loss": ours.run()["exact"]})
    return measured(_HEADS, ways, settings, target=0.35, slow=True)


@of_transformers(_GRADIENT, 4.0)
def head_gradient(settings: Settings) -> Result:
    """The estimates of all heads beside one forward pass."""
    ways, ours = Ways(), OneRun([*_GPT2, "task.method=gradient"])
    ways.add("one forward", lambda: ours.model(**ours.batch.inputs))
    ways.add(OURS, ours.run)
    return measured(_GRADIENT, ways, settings, target=4.0, slow=True)


@of_transformers(_CIRCUITS, 0.35)
def circuits(settings: Settings) -> Result:
    """The loss with 1, 2, 4, 8 or 16 of 48 heads: a forward pass for each of 105 sets by hand, and one run."""
    import torch

    ways = Ways()
    circuit = "task.circuit={sizes: [1, 2, 4, 8, 16], rest: 0, chance: 20}"
    small = ["model.args.config.vocab_size=8192", "data.args.half=[8, 8]", "compute.threads=1"]
    ours = OneRun([*_GPT2, *small, "task.method=gradient", circuit])
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in range(4)]
    orders = [ours.run().by_strength(), *(torch.randperm(48).tolist() for _ in range(20))]

    def loss(kept: list[int]) -> Any:
        handles = list[Any]()
        for layer, name in enumerate(names):
            mask = torch.zeros(48)
            mask[kept] = 1
            of_layer = mask[12 * layer : 12 * layer + 12].repeat_interleave(64)
            module = ours.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(lambda m, args, kept=of_layer: (args[0] * kept,)))
        value = ours.loss(ours.model(**ours.batch.inputs)).mean()
        for handle in handles:
            handle.remove()
        return value

    def by_hand() -> Any:
        return torch.stack(
            [torch.stack([loss(order[:size]) for size in (1, 2, 4, 8, 16)]) for order in orders]
        )

    def found() -> Any:
        effects = ours.run()
        return effects["replaced"] + effects["circuit"] * (effects["unedited"] - effects["replaced"])

    ways.add("by hand", by_hand, lambda: {"loss": by_hand()[0]})
    ways.add(OURS, ours.run, lambda: {"loss": found()})
    with threads(1, grad=False):
        return measured(_CIRCUITS, ways, settings, target=0.35, slow=True)


def tiny_cells(settings: Settings) -> Result:
    """48 cells of a model whose forward pass takes about a millisecond: mostly what a cell costs beside the model."""
    import torch

    with threads(1, grad=False):
        ways, ours = Ways(), OneRun(_TINY)
        names = [f"blocks.{layer}.resid_post" for layer in range(4)]

        def by_hand() -> torch.Tensor:
            cells: torch.Tensor = ours.zeroed(names, 12, _at_token)
            return cells

        ways.add("by hand", by_hand, lambda: {"loss": by_hand()})
        ways.add(OURS, ours.run, lambda: {"loss": ours.run()["exact"]})
        return measured(_CELLS, ways, settings, target=1.0, slow=True)


ROWS = (head_ablation, head_gradient, circuits, tiny_cells)
