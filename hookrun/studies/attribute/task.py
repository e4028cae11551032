"""task=attribute: how much each pixel, token or place of a layer adds to a score of its sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.selector import AnySelector
from hookrun.engine.spec.tokens import TokensClause
from hookrun.errors import Problem, compile_error, listed, spec_error
from hookrun.studies.attribute.records import ATTRIBUTIONS
from hookrun.studies.kit.tasks import BackwardPass, Direction, Experiment, ScoreKeys, Settings, TaskOfOneSplit

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.studies.kit.passes import DataInfo, Prepared, RunContext
    from hookrun.studies.kit.tasks import JobCache

WHERE = "task"
SCORE = "task.score"
MOST_STEPS = 1_000
INTEGRATED = "integrated_gradients"
GUIDED = "guided_backprop"
GRAD_CAM = "grad_cam"

MOST_PLACES = 10**6
Finite = Annotated[float, Field(allow_inf_nan=False)]
Size = Annotated[int, Field(strict=True, ge=1, le=MOST_PLACES)]


class AttributeTask(TaskOfOneSplit):
    """Attributes a score of each sample to its inputs or to a layer, with the hooks in place.

    method:   integrated_gradients: the mean gradient on the line from the baseline to the value, times their
              difference; the attributions of a sample add up to the difference of its scores. grad_cam: the channels
              of a layer, each weighted by the mean of its gradient, summed. guided_backprop: the gradient, of which
              each nn.ReLU passes back only what is positive
    steps:    of integrated_gradients: how many gradients (Gauss-Legendre quadrature)
    baseline: of integrated_gradients: the number in every element at which the line starts
    select:   the module whose output is attributed to, which grad_cam needs, or what a hook adds (hook:NAME.POINT);
              null: the inputs, for token ids the output of their embedding, summed over its width
    channels: of grad_cam: the dimension of the channels is the `first` after the batch, or the `last`; null: found by
              trial runs with larger pictures, whose height and width the other two dimensions must follow
    grid:     of grad_cam: the output is a sequence of the places of a picture with so many rows and columns
    skip_tokens: how many tokens stand before those of the grid, such as a class token
    score:    as `task.backward`, or its name alone: label, top (of the unchanged sample), output, loss,
              logit_difference, {score: class, class: 3}, or a function of a trusted package
    tokens:   for sequences: the positions at which the score is read; null: all with a token to predict
    """

    task_name: ClassVar[str] = "attribute"
    not_compiled: ClassVar[str] = (
        "task=attribute takes the place of outputs of modules, which is not possible in a compiled model"
    )
    repeats_passes: ClassVar[bool] = True
    takes_apart: ClassVar[bool] = True
    metrics: ClassVar[None] = None

    method: Literal["integrated_gradients", "grad_cam", "guided_backprop"] = "integrated_gradients"
    steps: Annotated[int, Field(strict=True, ge=1, le=MOST_STEPS)] = 50
    baseline: Finite = 0.0
    select: AnySelector | None = None
    channels: Literal["first", "last"] | None = None
    grid: tuple[Size, Size] | None = None
    skip_tokens: Annotated[int, Field(strict=True, ge=0, le=MOST_PLACES)] = 0
    score: ScoreKeys = BackwardPass.model_construct(score="label")
    tokens: TokensClause | None = None

    @model_validator(mode="after")
    def _has_a_layer(self) -> AttributeTask:
        if self.method == GRAD_CAM and self.select is None:
            raise ValueError("`method: grad_cam` needs `select`, the layer whose channels it weights")
        for key in ("channels", "grid", "skip_tokens"):
            if getattr(self, key) and self.method != GRAD_CAM:
                raise ValueError(f"`{key}` goes with `method: grad_cam`")
        if self.skip_tokens and self.grid is None:
            raise ValueError("`skip_tokens` goes with `grid`, the rows and columns of the tokens behind them")
        return self

    def scored(self) -> tuple[str, BackwardPass]:
        """The key path and the score, of which the trial run computes the gradient."""
        return SCORE, self.score

    def idle(self, hook: HookSpec) -> tuple[str, str] | None:
        """Gradient hooks do not fire: the backward passes are the task's own."""
        if super().idle(hook) is None:
            return None
        return (
            "does not see the gradients that task=attribute computes for itself",
            "use task.backward of task=predict, or leave the hook out",
        )

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The mean score, whose direction depends on what it is."""
        return {f"{self.split}/score": None}

    def model_problems(self, experiment: Experiment, info: DataInfo, model: Module) -> Iterator[Problem]:
        """With CompileError: an nn.ReLU for guided_backprop is not found."""
        from torch import nn

        yield from super().model_problems(experiment, info, model)
        if self.method == GUIDED and not any(isinstance(each, nn.ReLU) for each in model.modules()):
            raise compile_error(
                f"{WHERE}.method",
                "guided_backprop changes the gradient of nn.ReLU, and the model has no such module",
                "make F.relu a module, or use integrated_gradients",
            )

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Prepare the experiment, and find the module; of grad_cam the layout of the layer is proven, or found.

        Raises SpecError or CompileError with all mistakes found.
        """
        from hookrun.studies.attribute.layout import LAST, found_channels, output_shapes
        from hookrun.studies.kit.passes import EXAMPLE_BATCH

        prepared = super().prepare(experiment, trust=trust, cache=cache)
        module = self._module(prepared)
        if self.method != GRAD_CAM:
            return prepared
        model = prepared.model
        example = self.example(prepared.data, model, EXAMPLE_BATCH)
        shapes = output_shapes(model, example, str(module))
        shape = list(shapes[0]) if shapes else []
        grid = self.grid
        if grid is None:
            channels = self.channels or found_channels(shapes)
            key = "channels"
            why = "no two dimensions were seen to follow height and width of the picture"
            fits = channels is not None and len(shape) in (0, 4, 5)
        else:
            channels = self.channels or LAST
            tokens = math.prod(grid) + self.skip_tokens
            key = "grid"
            why = f"{list(grid)} with skip_tokens {self.skip_tokens} are {tokens} tokens"
            dim = 1 if channels == LAST else 2
            fits = not shape or (len(shape) == 3 and shape[dim] == tokens)
        if not fits:
            raise spec_error(
                f"{WHERE}.{key}",
                f"{self.select} returns shape {shape or 'unknown'}: {why}",
                "select another layer, or say where its channels are (task.channels=first, or last), or the rows and "
                "columns of its tokens (task.grid=[14,14] task.skip_tokens=1)",
            )
        task = self.model_copy(update={"channels": channels})
        settings = prepared.settings.model_copy(update={"task": task})
        places = "the other dimensions are places" if grid is None else f"the tokens are a grid {list(grid)}"
        line = f"grad_cam: channels {channels} in {shape or 'an unknown shape'}, {places}"
        experiment = replace(prepared.experiment, settings=settings)
        return replace(prepared, experiment=experiment, lines=(*prepared.lines, line))

    def lines(self, prepared: Prepared) -> Iterator[str]:
        """One line about the method."""
        how = f" in {self.steps} steps from {self.baseline:g}" if self.method == INTEGRATED else ""
        to = "the inputs" if self.select is None else str(self.select)
        yield f"{self.method}{how}: attributes {self.score} to {to}"

    def _module(self, prepared: Prepared) -> str | None:
        """The path of the selected module, or of what a hook adds; None: the inputs.

        Raises CompileError unless there is exactly one, which fits the method.
        """
        from hookrun.engine.plan.model_tree import ModelNames
        from hookrun.studies.kit.modules import selected

        if self.select is None:
            return None
        where = f"{WHERE}.select"
        names = ModelNames(prepared.model)
        for hook in prepared.plan.hooks:
            names.add_points(hook)
        paths = selected(names, self.select, where)
        if len(paths) > 1:
            raise compile_error(
                where, f"{str(self.select)!r} matches {len(paths)} modules: {listed(paths, 4)}", "name one"
            )
        if self.method == GRAD_CAM and paths[0] in names.tree.points:
            raise compile_error(
                where,
                f"{str(self.select)!r} is what a hook adds, and grad_cam weights the channels of a module",
                "name a module, or use integrated_gradients",
            )
        return paths[0]

    def perform(self, context: RunContext) -> None:
        """Attribute the scores of the split's samples, and write attributions.safetensors."""
        from safetensors.torch import save_file

        from hookrun.studies.attribute.attributing import Attributing, AttributionRows
        from hookrun.studies.attribute.layout import channels_first
        from hookrun.studies.kit.passes import Batches, Scoring

        batches = Batches(context.prepared, self.split)
        attributing = Attributing(
            context,
            Scoring(self.score, SCORE, context.prepared.loss, context.measuring),
            self._module(context.prepared),
            method=self.method,
            steps=self.steps,
            baseline=self.baseline,
            channels_first=partial(channels_first, self.channels, self.grid, self.skip_tokens),
        )
        rows = AttributionRows()
        names = context.sample_names({self.split: batches})
        with context.evaluating(batches, self.name, {"rows": rows, "names": names}) as (passed, _):
            for batch in passed:
                with context.logged(context.hooks.clock.step):
                    output = attributing.forward(batch)
                names.write(batch, output)
                rows.add(batch.ids, attributing.of(batch, output))
                context.hooks.step()
        names.write_pictures()
        about = dict[str, str](method=self.method, split=self.split)
        save_file(rows.state_dict(), context.run_dir.path / ATTRIBUTIONS, about)
        context.conclude(self.split, {"samples": names.seen.total(), **rows.means()})
