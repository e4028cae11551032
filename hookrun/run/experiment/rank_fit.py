"""Checks what several ranks cannot compute as one process does: it is refused before the run, or noted in the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hookrun.engine.actions.values import is_drawn
from hookrun.engine.plan.plan import PlannedHook, ResolvedPlan
from hookrun.engine.plan.table import Column
from hookrun.engine.runtime.part import Part
from hookrun.engine.values.index import Index
from hookrun.errors import CompileError, Problem, listed, refuse
from hookrun.run.experiment.metrics.losses import TrainLoss
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.sharding import shard_problems

_WEIGHTED = ("weight", "ignore_index")
"""Arguments that make a loss a weighted mean, with a total weight that differs from rank to rank."""
_MEAN_OF_LABELS = ("cross_entropy", "nll")


def settings_misfits(settings: Settings, *, scores: bool) -> Iterator[Problem]:
    """Problems of the settings under several ranks.

    scores: the task computes the loss
    """
    strategy = settings.compute.strategy
    if settings.compute.compile:
        yield Problem(
            "compute.compile",
            f"a compiled model under compute.strategy={strategy} is not known to compute the same as one process",
            "leave one of them out",
        )
    if strategy == "fsdp" and settings.compute.precision == "fp16":
        yield Problem(
            "compute.precision",
            "the gradient scaler of fp16 is not known to be correct with sharded gradients",
            "use bf16, or compute=ddp",
        )
    loss = settings.train.loss
    given = [] if loss is None else [key for key in _WEIGHTED if key in loss.args]
    if loss is not None and scores and loss.name in _MEAN_OF_LABELS and given:
        yield Problem(
            f"train.loss.{given[0]}",
            f"{', '.join(given)} makes {loss.name} a weighted mean, which is not the mean of the ranks' means",
            "leave it out, or use compute.strategy=none",
        )


def hook_misfits(plan: ResolvedPlan) -> Iterator[Problem]:
    """A problem for each hook whose results would depend on the number of ranks: it sees only a rank's own rows."""
    alone = "use compute.strategy=none"
    for hook in plan.hooks:
        spec, action = hook.spec, hook.spec.action
        if not spec.hook_type.sees_batch:
            continue
        name = action.action_name
        where = spec.where
        draws = action.draws and not action.own_functions()  # those are refused when they draw
        if draws and "generator" in action.uses:
            yield Problem(
                f"{where}.action",
                f"{name} may draw random numbers for the rows of a batch, which would differ by rank",
                alone,
            )
        if draws and spec.keys.tokens is not None:
            yield Problem(
                f"{where}.tokens",
                f"{name} may draw random numbers for positions, and each rank has its own positions",
                alone,
            )
        if action.mixes_rows:
            yield Problem(
                f"{where}.action",
                f"{name} needs all rows of the batch together, and each rank has only its own",
                f"put it on the gradients of parameters (optimizer_step_pre), or {alone}",
            )
        for field, value in action.outside_values().items():
            if is_drawn(value):
                yield Problem(f"{where}.{field}", "each rank would draw other samples for its rows", alone)
        index = spec.keys.index
        if index is not None and _picks_rows(index, hook):
            yield Problem(
                f"{where}.index",
                f"'{index}' picks rows of the batch by their place, and each rank has only its own",
                alone,
            )
        if action.captures:
            yield from _captures_without_rows(hook)


def _captures_without_rows(hook: PlannedHook) -> Iterator[Problem]:
    """A problem if a capture has no row for each sample on some modules."""
    whole: list[str] = []
    for match in hook.matches:
        if match.bytes is not None and not match.per_sample:
            whole.append(match.path or "(root)")
    if whole:
        yield Problem(
            f"{hook.spec.where}.action",
            f"it has no row for each sample on {listed(whole)}, and each rank would have another value",
            "narrow `select`, or name a part with a row for each sample by `target`",
        )


def _picks_rows(index: Index, hook: PlannedHook) -> bool:
    """Whether the index selects in the batch dimension of what the hook sees, as far as its shapes are known."""
    part = Part(index)
    for match in hook.matches:
        dim = hook.batch_of(match.path).of("")
        dims = match.shape.count(",") + 1 if match.shape and match.shape[0] == "[" else len(index.items)
        if dim is not None and part.place_of(dim, dims) is None:
            return True
    return False


def differences(plan: ResolvedPlan, model: nn.Module, loss: TrainLoss, *, trains: bool) -> Iterator[str]:
    """A line for each result that necessarily differs between one process and several ranks."""
    if trains:
        norms = _paths_of(model, lambda module: isinstance(module, _BatchNorm))
        if norms:
            yield f"batch statistics are those of a rank's own rows: {listed(norms)}"
        drops = dropping(model)
        if drops:
            yield f"dropout draws other masks on each rank: {listed(drops)}"
        if loss.code is not None:
            yield f"train.loss: {loss.name} is assumed to be the mean over the samples of a batch"
    for hook in plan.hooks:
        what = _differs(hook)
        if what is not None:
            yield f"{hook.spec.name}: {what}"


def _differs(hook: PlannedHook) -> str | None:
    """How the hook's results differ with several ranks; None if they do not."""
    action = hook.spec.action
    if not hook.spec.hook_type.sees_batch or action.reports_loss:
        return None
    if action.own_functions():
        return "your own function gets only a rank's own rows"
    if action.observes and not action.of_all_rows:
        return f"{action.action_name} reports each rank's own rows"
    return None


def under_ranks(plan: ResolvedPlan) -> Column:
    """The plan's column that says what each hook sees if several ranks split the batches."""
    return "under ranks", {hook.spec.name: _seen_under_ranks(hook) for hook in plan.hooks}


def _seen_under_ranks(hook: PlannedHook) -> str:
    hook_type = hook.spec.hook_type
    action = hook.spec.action
    if action.reports_loss:
        return "reduced, once"
    if not hook_type.sees_batch:
        return "reduced, once" if hook_type.phase in ("backward", "step") else "the same on each"
    if _differs(hook) is not None:
        return "differs: own rows"
    return "all rows" if action.captures or action.folds else "own rows"


def _paths_of(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    return [path or "(root)" for path, module in model.named_modules() if holds(module)]


def dropping(model: nn.Module) -> list[str]:
    """The paths of the modules that set a random part to 0 in training."""
    return _paths_of(model, _drops)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    for name in ("dropout", "dropout_p", "attention_dropout"):
        rate = getattr(module, name, None)
        if isinstance(rate, int | float) and rate > 0:
            return True
    return False


def check_ranks(
    plan: ResolvedPlan, model: nn.Module, loss: TrainLoss, settings: Settings, *, trains: bool
) -> list[str]:
    """Notes on results that differ with several ranks.

    Raises CompileError for what several ranks cannot do, and under `strict` also for results that differ.
    """
    problems = list(hook_misfits(plan))
    lines = list(differences(plan, model, loss, trains=trains))
    if settings.compute.strategy == "fsdp":
        problems += shard_problems(settings, model, plan)
        if (dtype := settings.compute.fsdp.mixed_precision) is not None:
            lines.append(f"compute.fsdp.mixed_precision: parameters and activations are in {dtype}")
    if settings.strict:
        problems += [
            Problem(
                "compute.strategy",
                f"differs from one process: {line}",
                "strict=false makes it a note; compute.strategy=none computes it in one process",
            )
            for line in lines
        ]
    refuse(problems, CompileError)
    return [f"differs from one process: {line}" for line in lines]
