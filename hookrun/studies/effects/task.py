"""task=effects: one hook is moved over many sites, and what each does to one metric is written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from hookrun.engine.actions import values as action_values
from hookrun.engine.hook_types import FORWARD_PRE
from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.tokens import TokensClause
from hookrun.errors import (
    Problem,
    Refusal,
    SpecError,
    first_lines,
    listed,
    nearest,
    refuse,
)
from hookrun.studies.effects.circuit import REST, Circuit, Sets
from hookrun.studies.effects.over import (
    CALL,
    EVERY,
    EXPERTS,
    MODULE,
    WHERE,
    Over,
    first_value,
    listed_if_one,
    place_of,
    problems_of,
    varied,
)
from hookrun.studies.kit.tasks import (
    MOST_ROWS,
    Against,
    Entry,
    Experiment,
    MetricKeys,
    MostRows,
    Settings,
    TaskOfOneSplit,
    samples_of_a_pass,
)

if TYPE_CHECKING:
    from hookrun.studies.effects.cells import Cells
    from hookrun.studies.effects.records import Effects
    from hookrun.studies.kit.passes import Batches, Prepared, RunContext
    from hookrun.studies.kit.tasks import JobCache

MOST_REPEATS = 1_000
Method = Literal["exact", "gradient"]
EXACT: Method = "exact"
GRADIENT: Method = "gradient"


class EffectsTask(TaskOfOneSplit):
    """Writes effects.safetensors and effects.csv: the metric in each cell of the grid that `over` spans.

    hook:    the name of the hook that is moved; all others stay as they are
    over:    keys of the hook -> `each`, a list of values, or {window: n, stride: m}: `module`, `heads`, `tokens`,
             `index`, `call` (of a module that is called several times in a forward), and the parameters of its action,
             of which `experts` can be counted, too
    metric:  a metric as in `task.metrics` of task=evaluate, computed for each sample, or over the whole split
    tokens:  for sequences: the positions at which the metric is computed; null: all that have a target
    against: a run of task=predict: `restored` is (cell - unedited) / (its metric - unedited)
    method:  exact, gradient or both; gradient is an estimate to first order from one backward pass for all cells
    placebo: how often each cell is also computed with the values of other samples
    seeds:   how often each cell is computed, with other random numbers
    circuit: keep the strongest cells, replace all others: {sizes: [1, 2, 4], rest: {run: R}, chance: 20}
    max_rows: for a metric over the whole split: how many samples or tokens of all cells together are kept at most
    """

    task_name: ClassVar[str] = "effects"
    takes_apart: ClassVar[bool] = True

    hook: str | None = None
    over: Over | None = None
    metric: Entry | None = None
    tokens: TokensClause | None = None
    against: Against | None = None
    method: Annotated[
        tuple[Method, ...],
        BeforeValidator(listed_if_one, json_schema_input_type=Method | list[Method]),
        Field(min_length=1),
    ] = (EXACT,)
    placebo: Annotated[int, Field(strict=True, ge=0, le=MOST_REPEATS)] = 0
    seeds: Annotated[int, Field(strict=True, ge=1, le=MOST_REPEATS)] = 1
    circuit: Circuit | None = None
    max_rows: MostRows = MOST_ROWS

    @field_validator("metric")
    @classmethod
    def _of_each_sample(cls, metric: MetricKeys | None) -> MetricKeys | None:
        if metric is not None and metric.by is not None:
            raise ValueError("`by` has no meaning here: the metric is computed for each sample anyway")
        if metric is not None and metric.average == "none":
            raise ValueError("a cell has one value: leave out average: none")
        return metric

    @property
    def named_runs(self) -> Mapping[str, str]:
        """Key path -> name of each run that the circuit reads."""
        return {} if self.circuit is None else self.circuit.runs

    @property
    def metrics(self) -> tuple[MetricKeys, ...]:
        """The metric, where others have `task.metrics`."""
        return () if self.metric is None else (self.metric,)

    def completed(self, hooks: Any) -> Any:
        """The hooks; the moved one has the first value of each key that it does not have itself, where it is known.

        Without `select` it has the listed modules, or every one.
        """
        if not isinstance(hooks, Mapping) or not isinstance(hooks.get(self.hook), Mapping):
            return hooks
        body = dict(hooks[self.hook])
        over = self.over or {}
        for key, values in over.items():
            if key == EXPERTS or (isinstance(values, tuple) and key not in (MODULE, CALL)):
                body.setdefault(key, first_value(key, values))
        if MODULE in over and body.get("select") is None:
            modules = over[MODULE]
            body["select"] = list(modules) if isinstance(modules, tuple) else [EVERY]
        return {**hooks, self.hook: body}

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Prepare the experiment with the first value of each axis, then check every cell of the grid.

        Raises SpecError or CompileError with all mistakes found.
        """
        from hookrun.engine.prove.trial import prove
        from hookrun.studies.effects.grid import SiteGrid
        from hookrun.studies.effects.moved import MovedHook
        from hookrun.studies.effects.rest import Rest

        first = self._with_first_values(experiment)
        try:
            prepared = super().prepare(first, trust=trust, cache=cache)
        except Refusal as error:
            raise self._at_task(error) from error
        grid = SiteGrid(prepared, str(self.hook), self.over or {}, self.splits[0])
        hooks = {self._place_of_cells(): lambda cell: cell.hook}
        if self.circuit is not None:
            refuse(self.circuit.size_problems(len(grid.cells)))
            samples = samples_of_a_pass(prepared.settings, prepared.data.sizes[self.splits[0]])
            grid.rest = rest = Rest(prepared, grid.hook, self.circuit.rest, grid.runs, grid.names(), samples)
            hooks[REST] = lambda cell: rest.of(cell.hook)
        for where, hook_of in hooks.items():
            try:
                proven = prove(
                    prepared.plan,
                    prepared.model,
                    grid.example,
                    training=False,
                    backward=False,
                    replace_op=partial(grid.try_every_cell, hook_of),
                )
            except Refusal as error:
                raise self._at_task(error, where) from error
        trials = grid.trials(dict.fromkeys(self.method, self.seeds), self.placebo)
        passes = len(trials)
        if self.circuit is not None:
            passes += 1 + self.circuit.most_sets(len(grid.cells))
        if prepared.metrics[0].over is not None:
            refuse(self._over_split_problems(prepared, passes))
        lines = [*prepared.lines, *grid.lines()]
        if self.circuit is not None and grid.rest is not None:
            replaces_inputs = grid.hook.spec.hook_type is FORWARD_PRE
            paths = () if replaces_inputs else grid.paths
            lines += self.circuit.lines(len(grid.cells), grid.rest.value, paths)
        if proven.unchecked is not None:
            lines.append(f"cells unchecked: {proven.unchecked}")
        metrics = [replace(metric, where="task.metric") for metric in prepared.metrics]
        moved = MovedHook(grid, trials)
        return replace(prepared, lines=tuple(lines), replace_op=moved, metrics=tuple(metrics))

    def _place_of_cells(self) -> str:
        """The key path at which a mistake in a cell is told: the only key of `over` beside the modules, or `over`."""
        keys = [key for key in self.over or () if key != MODULE]
        return f"{WHERE}.{keys[0]}" if len(keys) == 1 else WHERE

    def _at_task(self, error: Refusal, place_of_cells: str = "") -> Refusal:
        """The mistakes at the places where the values of the hook were given."""
        hook = str(self.hook)
        problems: list[Problem] = []
        for problem in error.errors:
            where = place_of(problem.where, hook, self.over or {}).replace("task.metrics.0", "task.metric")
            if place_of_cells and where == f"hooks.{hook}":
                where = place_of_cells
            problems.append(problem.moved(where))
        return type(error)(problems, error.notes)

    def _with_first_values(self, experiment: Experiment) -> Experiment:
        """The experiment with the first value of each axis in its hook. SpecError with the mistakes of the task."""
        problems = list(self._problems(experiment))
        if problems or self.hook is None or self.over is None:
            raise SpecError(problems)
        values: dict[str, Any] = {}
        for key, of_key in self.over.items():
            if key != MODULE or isinstance(of_key, tuple):
                values[key] = first_value(key, of_key)
        hooks = list(experiment.hooks.hooks)
        for place, hook in enumerate(hooks):
            if hook.name == self.hook:
                hooks[place], problems = varied(hook, values)
                refuse(problems)
        return replace(experiment, hooks=replace(experiment.hooks, hooks=tuple(hooks)))

    def _problems(self, experiment: Experiment) -> Iterator[Problem]:
        """The mistakes that are seen without the model."""
        for key, hint in _NEEDED.items():
            if getattr(self, key) is None:
                yield Problem(f"task.{key}", "is not given", hint)
        enabled = {hook.name: hook for hook in experiment.hooks.hooks if hook.keys.enabled}
        if self.hook is not None and self.hook not in enabled:
            what = f"found {self.hook!r}, which is not an enabled hook of the experiment"
            yield Problem("task.hook", what, nearest(self.hook, enabled))
        yield from self._settings_problems(experiment.settings)
        for hook in enabled.values():
            for field, value in hook.action.outside_values().items():
                if isinstance(value, action_values.PassValue):
                    yield Problem(
                        f"{hook.where}.{field}",
                        f"{value}: the task leaves out parts of passes, also captures",
                        "take the value from a run",
                    )
        if self.hook in enabled and self.over is not None:
            yield from problems_of(self.over, enabled[self.hook])
            yield from self._hook_problems(enabled[self.hook])
            if self.circuit is not None:
                yield from self.circuit.problems(self.over, enabled[self.hook])

    def _settings_problems(self, settings: Settings) -> Iterator[Problem]:
        if settings.compute.compile:
            yield Problem(
                "compute.compile",
                "a compiled graph has one hook, and here it changes from pass to pass",
                "leave it out",
            )
        if GRADIENT in self.method and self.metric is not None and self.metric.name in _STEPS:
            yield Problem(
                "task.method",
                f"the gradient of {self.metric.name} is 0 almost everywhere",
                "use loss, probability or logit_difference",
            )
        if EXACT not in self.method and (self.placebo or self.against is not None):
            yield Problem(
                "task.method",
                "placebos, and what is restored, are computed exactly",
                "add exact, or leave out placebo and against",
            )

    def _over_split_problems(self, prepared: Prepared, trials: int) -> Iterator[Problem]:
        """Why a metric over the whole split cannot be computed for this grid."""
        from hookrun.studies.kit.passes import too_many_rows

        metric = prepared.metrics[0]
        samples = samples_of_a_pass(prepared.settings, prepared.data.sizes[self.splits[0]])
        if GRADIENT in self.method:
            yield Problem(
                "task.method",
                f"{metric.name!r} is computed over the whole split, and has no gradient",
                "use exact",
            )
        yield from too_many_rows(metric, (samples or 0) * (trials + 1), self.max_rows)

    def _hook_problems(self, hook: HookSpec) -> Iterator[Problem]:
        """Why the hook cannot be moved, or cannot be repeated with other values."""
        kind = hook.hook_type
        action = hook.action
        if kind.phase != "forward" or kind.until_backward or action.observes or action.acts_on_call:
            yield Problem(
                "task.hook",
                f"{action.action_name} on {kind} does not edit a value that a forward pass computes",
                "move an edit on forward or forward_pre",
            )
        values = [*action.outside_values().values(), *(self.over or {}).get("value", ())]
        if self.placebo and not any(
            isinstance(value, dict) or action_values.is_by_sample(value) for value in values
        ):
            yield Problem(
                "task.placebo",
                "a placebo takes the values of other samples, and the hook has the same value for all samples",
                "use a value with sample: same, or leave it out",
            )
        draws = action.draws or hook.keys.when.probability < 1
        if (
            self.seeds > 1
            and not draws
            and not any(isinstance(v, dict) or action_values.is_drawn(v) for v in values)
        ):
            yield Problem(
                "task.seeds",
                f"{action.action_name} draws no random numbers, so all seeds are equal",
                "leave it out",
            )

    def lines(self, prepared: Prepared) -> list[str]:
        """What is moved."""
        metric = prepared.metrics[0]
        of_what = "each sample" if metric.over is None else "the whole split"
        moved = f"{self.hook} is moved over {', '.join(self.over or ())}; {metric.name} of {of_what}"
        observers = [hook.spec.name for hook in prepared.plan.hooks if hook.spec.action.observes]
        if not observers:
            return [moved]
        return [moved, f"{listed(observers)}: in the pass without {self.hook} only"]

    # ---- the run ---------------------------------------------------------------------------------------------------

    def perform(self, context: RunContext) -> None:
        """Compute every cell for every batch, and write the files."""
        from hookrun.studies.effects.cells import Cells
        from hookrun.studies.effects.moved import MovedHook
        from hookrun.studies.effects.records import PLAIN, write_effects
        from hookrun.studies.kit.passes import Batches

        moved = context.prepared.replace_op
        assert isinstance(moved, MovedHook)
        batches = Batches(context.prepared, self.splits[0])
        names = context.sample_names({self.splits[0]: batches})
        samples = samples_of_a_pass(context.settings, batches.samples)
        assert samples is not None
        against = None if self.against is None else self.against.run
        values = Cells(context, moved, moved.trials, samples, against)
        with context.resuming.state_part("cells", values, {}):
            if not values.is_done:
                with context.evaluating(batches, self.name, {"names": names}) as (passed, _):
                    for batch in passed:
                        names.write(batch, values.compute(batch))
                        context.hooks.step()
                names.write_pictures()
                values.end()
            effects = values.effects(self.splits[0])
            if self.circuit is not None and not context.stopped:
                effects = self._with_circuit(self.circuit, values, effects, batches)
        write_effects(context.run_dir.path, effects)
        lines = [effects.strongest(), *effects.faithfulness(), *first_lines(effects.faults)]
        context.screen.say("\n".join(lines))
        context.conclude(self.split, {"unedited": float(effects[PLAIN]), "cells": len(moved.grid.cells)})

    def _with_circuit(self, circuit: Circuit, values: Cells, effects: Effects, batches: Batches) -> Effects:
        """The effects with those of a circuit, from a second pass over the samples."""
        grid = values.moved.grid
        cells = {cell.number for cell in grid.cells}
        order = [number for number in effects.by_strength() if number in cells]
        sets = Sets(circuit, order, grid.prepared.settings.seed)
        values = values.again(sets.trials)
        with values.context.evaluating(batches, "circuit", {"cells": values}) as (passed, _):
            for batch in passed:
                values.compute(batch)
                values.context.hooks.step()
        return effects.with_circuit(
            circuit.sizes, sets.results(values.means(), effects.unedited), values.faults()
        )


_NEEDED = {
    "hook": "name the hook that is moved",
    "over": "name its keys, as in {module: each, heads: each}",
    "metric": "name one, such as loss or logit_difference",
}
_STEPS = ("accuracy", "top5_accuracy", "rank")
"""Metrics that do not change smoothly."""
