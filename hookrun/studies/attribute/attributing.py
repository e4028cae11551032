"""Attributions of one batch at a time: integrated gradients, Grad-CAM, guided backpropagation.

The model runs once with everything that its hooks do. It then runs again for the gradients, where hooks that edit the
forward pass act as before, and nothing is recorded or counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hookrun.engine.plan.points import point_path
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.calls import IDS, MASK
from hookrun.engine.values.containers import tensors
from hookrun.engine.values.tensors import computable, read_together
from hookrun.errors import HookrunError, counted, listed
from hookrun.studies.kit.observing import Observers, paths_of
from hookrun.studies.kit.passes import (
    IGNORED,
    Batch,
    RunContext,
    Scoring,
    main_tensor,
    new_nodes,
)
from hookrun.studies.kit.tasks import BackwardPass, metric_tokens_of

MOST_BYTES = 2 * 2**30
"""How much memory the attributions of all samples may take."""

Values = dict[str, Tensor]
"""Name of an input, or path of a module -> a tensor with a row for each sample."""


class Attributing:
    """Attributes the score of each sample to the inputs or to the output of one module.

    module: the path of the module, or of what a hook adds; None: the inputs, for token ids the module that embeds them
    method, steps, baseline: the keys of the task
    channels_first: the module's output as [B, C, height, width], for grad_cam; RuntimeError if that is not possible
    """

    def __init__(
        self,
        context: RunContext,
        scoring: Scoring,
        module: str | None,
        *,
        method: str,
        steps: int,
        baseline: float,
        channels_first: Callable[[Tensor], Tensor],
    ) -> None:
        self._context = context
        self._scoring = scoring
        self._method = method
        self._steps = steps
        self._baseline = baseline
        self._channels_first = channels_first
        self._module = module
        self._point: nn.Module | None = None
        for site in context.hooks.sites:
            for name, point in site.points.items():
                if point_path(site.path, site.hook_name, name) == module:
                    self._point = point
        self._is_embedding = False
        self._leaves = Values()
        self._values = Values()
        self._relus = 0
        self._draws = list[tuple[HookSite, Any]]()

    def forward(self, batch: Batch) -> Any:
        """The model's output for a batch, which stays as it is if the model writes into its inputs."""
        self._draws = [(site, site.draws_place) for site in self._context.hooks.sites if site.draws]
        return self._context.forward(batch.copied())

    def _again(self, batch: Batch) -> Any:
        """The output for the same samples, with the same random numbers of hooks."""
        for site, place in self._draws:
            site.draws_place = place
        return self._context.forward(batch)

    def of(self, batch: Batch, output: Any) -> Values:
        """`attributions` [B, ...] (of several inputs `attributions.NAME`), `scores` [B], maybe `delta` [B].

        output: the model's output for the batch, under all hooks

        Raises HookrunError if the method does not fit the model.
        """
        scores = self._scoring.of_samples(output, batch.target, batch)
        scoring, batch = self._of_fixed_classes(batch, output)
        with self._context.silently(edit=True):
            if self._module is None and not _floating(batch):
                self._module = self._embedding(batch)
                self._is_embedding = True
            match self._method:
                case "grad_cam":
                    attributions = self._grad_cam(*self._gradients(scoring, batch))
                case "guided_backprop":
                    _, attributions = self._gradients(scoring, batch)
                case _:
                    attributions = self._integrated(scoring, batch)
            numbers: Values = {"scores": scores}
            if self._method == "integrated_gradients" and len(scores) == len(batch.ids):
                with self._pass(batch, 0.0) as at_start:
                    at_baseline = scoring.of_samples(at_start, batch.target, batch)
                total = sum(values.flatten(1).sum(1) for values in attributions.values())
                numbers["delta"] = total - (scores - at_baseline)
        result = Values()
        for name, values in attributions.items():
            if self._is_embedding:
                values = values.sum(-1)
            if batch.data.of_tokens:
                values = _from_first_real(values, batch)
            result[f"attributions.{name}" if len(attributions) > 1 else "attributions"] = values
        result |= numbers
        return dict(zip(result, read_together(result.values()), strict=True))

    def _of_fixed_classes(self, batch: Batch, output: Any) -> tuple[Scoring, Batch]:
        """For `score: top` the score of the class that the unchanged sample has, which stays the same on the way."""
        if self._scoring.keys.score != "top":
            return self._scoring, batch
        target = main_tensor(self._scoring.loss.reader.named(output)).argmax(-1)
        if batch.data.of_tokens and metric_tokens_of(self._context.prepared.task) is None:
            target = target.masked_fill(batch.target == IGNORED, IGNORED)
        return replace(self._scoring, keys=BackwardPass(score="label")), replace(batch, target=target)

    # ---- the methods -----------------------------------------------------------------------------------------------

    def _integrated(self, scoring: Scoring, batch: Batch) -> Values:
        nodes, weights = np.polynomial.legendre.leggauss(self._steps)
        total: Values = {}
        for node, weight in zip(nodes, weights, strict=True):
            _, gradients = self._gradients(scoring, batch, (1 + node) / 2)
            for name, gradient in gradients.items():
                part = gradient * (weight / 2)
                if name in total:
                    part = total[name] + part
                total[name] = part
        return {name: each * (self._values[name] - self._baseline) for name, each in total.items()}

    def _grad_cam(self, values: Values, gradients: Values) -> Values:
        """[B, 1, height, width]: the sum over the channels [B, C, height, width], weighted by their mean gradients."""
        maps: Values = {}
        for name, whole in gradients.items():
            try:
                gradient, value = map(self._channels_first, (whole, values[name]))
            except RuntimeError as error:
                raise HookrunError(
                    f"task.select: {name} returns shape {list(whole.shape)}: {error}"
                ) from error
            if whole.any() and not gradient.any():
                raise HookrunError(
                    f"task.select: the score depends on the skipped tokens of {name} only: name an earlier layer"
                )
            weights = gradient.mean(tuple(range(2, gradient.dim())), keepdim=True)
            maps[name] = (weights * value).sum(1, keepdim=True)
        return maps

    # ---- a forward and a backward ----------------------------------------------------------------------------------

    def _gradients(self, scoring: Scoring, batch: Batch, share: float = 1.0) -> tuple[Values, Values]:
        """The values that scores are attributed to, and the gradient of the score there, in float32 or float64.

        share: where to take the gradient, from 0 at the baseline to 1 at the values
        """
        with torch.enable_grad(), self._pass(batch, share) as output:
            total = scoring(output, batch.target, batch)
            if not self._leaves:
                raise HookrunError(f"task.select: {self._module} was not called")
            if self._method == "guided_backprop":
                self._require_modules(total)
            # a leaf requires no gradient where the model switches gradients off
            leaves = {name: leaf for name, leaf in self._leaves.items() if leaf.requires_grad}
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if leaves else ()
        gradients = Values()
        for name, gradient in zip(leaves, grads, strict=True):
            if gradient is None:
                continue
            if len(gradient) != len(batch.ids):
                raise HookrunError(
                    f"task.select: the first dimension of what {name} returns is not the samples"
                )
            gradients[name] = computable(gradient)
        if not gradients:
            raise HookrunError(f"task.select: the score does not depend on {listed(list(self._leaves), 4)}")
        return self._values, gradients

    @contextmanager
    def _pass(self, batch: Batch, share: float) -> Iterator[Any]:
        """The model's output with the values at `share` of the way from the baseline, as leaves of the graph.

        In the block hooks change gradients as the method asks for.
        """
        self._leaves = {}
        self._values = {}
        self._relus = 0
        observers = Observers(self._context.model)
        adding: AbstractContextManager[Any] = nullcontext()
        if self._module is None:
            change = {name: self._leaf(name, tensor, share) for name, tensor in _floating(batch).items()}
            inputs = {**batch.inputs, **change} if isinstance(batch.inputs, dict) else change[""]
            batch = replace(batch, inputs=inputs)
        else:
            batch = batch.copied()
            path = self._module
            if self._point is None:
                observers.change_outputs([path], lambda path, value: self._leaf(path, value, share))
            else:
                adding = self._point.register_forward_hook(
                    lambda _, args, value: self._leaf(path, value, share)
                )
        if self._method == "guided_backprop":
            relus = paths_of(self._context.model, nn.ReLU)
            observers.see_outputs(relus, self._count)
            observers.change_gradients(relus, lambda _, gradient: gradient.clamp_min(0))
        with adding, observers.installation():
            yield self._again(batch)

    def _leaf(self, name: str, value: Tensor, share: float) -> Tensor:
        """The tensor that takes the place of a value; a clone, because the model may write into it."""
        if name in self._leaves:
            raise HookrunError(
                f"task.select: {name} is called several times, or returns several tensors: name another"
            )
        value = value.detach().clone()
        leaf = value
        if share != 1:
            leaf = self._baseline + share * (value - self._baseline)
        leaf = leaf.to(value.dtype).requires_grad_(torch.is_grad_enabled())
        self._values[name] = value
        self._leaves[name] = leaf
        return leaf.clone()

    def _count(self, path: str, value: Any) -> None:
        self._relus += 1

    def _require_modules(self, total: Tensor) -> None:
        """Raise HookrunError unless every ReLU of the graph is an nn.ReLU, whose gradient a hook can change."""
        in_graph = sum(node.name() == "ReluBackward0" for node in new_nodes(total, set()))
        if in_graph > self._relus:
            raise HookrunError(
                f"task.method: guided_backprop changes the gradient of nn.ReLU, and {in_graph - self._relus} of the "
                f"{in_graph} ReLUs that the model computes are functions (F.relu, torch.relu), which no hook reaches: "
                "make them nn.ReLU modules, or use integrated_gradients"
            )

    # ---- modules ---------------------------------------------------------------------------------------------------

    def _embedding(self, batch: Batch) -> str:
        """The path of the nn.Embedding that is called with the batch's token ids. HookrunError unless there is one."""
        batch = batch.copied()
        inputs = batch.inputs if isinstance(batch.inputs, dict) else {IDS: batch.inputs}
        if IDS in inputs:
            inputs = {IDS: inputs[IDS]}
        ids = {tensor.data_ptr() for tensor in inputs.values()}
        paths: dict[str, None] = {}

        def see(path: str, value: Any) -> None:
            if any(tensor.data_ptr() in ids for tensor in tensors(value)):
                paths[path] = None

        observers = Observers(self._context.model)
        observers.see_inputs(paths_of(self._context.model, nn.Embedding), see)
        with observers.installation():
            self._again(batch)
        if len(paths) != 1:
            raise HookrunError(
                f"task.select: integer inputs have no gradient, and {counted(len(paths), 'nn.Embedding')} of the model "
                f"takes them ({listed(list(paths), 4) or 'none'}): name the module to whose output the score is "
                "attributed"
            )
        return next(iter(paths))


def _floating(batch: Batch) -> Values:
    """The floating-point inputs by name; a single input has the name ''."""
    inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {"": batch.inputs}
    return {name: tensor for name, tensor in inputs.items() if tensor.is_floating_point()}


def _from_first_real(values: Tensor, batch: Batch) -> Tensor:
    """Values [B, T, ...] in columns that count from each sample's first real token; 0 behind its last one."""
    mask = batch.inputs.get(MASK) if isinstance(batch.inputs, dict) else None
    if mask is None or values.shape[:2] != mask.shape:
        return values
    real = mask != 0
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    rows = torch.arange(len(values), device=values.device)[:, None]
    kept = real[rows, order].reshape(*real.shape, *[1] * (values.dim() - 2))
    return values[rows, order] * kept


@dataclass
class AttributionRows:
    """The attributions of all batches so far."""

    _parts: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def add(self, ids: Tensor, values: Values) -> None:
        """Add the values of a batch. HookrunError if they take too much memory."""
        for name, tensor in {"sample_ids": ids, **values}.items():
            self._parts.setdefault(name, []).append(tensor)
            self._bytes += tensor.nbytes
        if self._bytes > MOST_BYTES:
            raise HookrunError(
                f"task=attribute keeps its results in memory, at most {MOST_BYTES // 2**30} GiB: "
                "set train.limit_batches"
            )

    def state_dict(self) -> Values:
        """The rows so far; sequences are as long as the longest, with 0 behind their end."""
        rows = Values()
        for name, parts in self._parts.items():
            if parts[0].dim() > 1:
                rows[name] = pad_sequence([row for part in parts for row in part], batch_first=True)
            else:
                rows[name] = torch.cat(parts)
        return rows

    def means(self) -> dict[str, float]:
        """The mean score, and for integrated gradients the mean of how far a sample's sum is off."""
        means = {"score": torch.cat(self._parts["scores"]).double().mean().item()}
        if "delta" in self._parts:
            means["delta"] = torch.cat(self._parts["delta"]).double().abs().mean().item()
        return means

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the rows by saved ones."""
        self._parts = {name: [tensor] for name, tensor in state.items()}
        self._bytes = sum(tensor.nbytes for tensor in state.values())
