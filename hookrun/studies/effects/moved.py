"""What each hook does in a pass over several copies of a batch, of which each belongs to another cell of the grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.calls import Pass
from hookrun.engine.values.containers import members, rebuild
from hookrun.studies.effects.grid import Grid, Job


@dataclass
class Activation:
    """A value that the hook sees in the pass of the gradient.

    value:   as it is without the hook
    tensors: its floating-point tensors, from which on the pass is differentiated
    """

    site: HookSite
    value: Any
    tensors: list[Tensor]
    of_pass: Pass | None
    call: int


class Moved:
    """Decides for each hook what it does in the current pass. Between passes nothing but observers fires.

    The moved hook does what its jobs say, each for its copy of the batch; other edits run on each copy by itself,
    with the same random numbers; observers see the pass without the hook only.

    jobs:    what is computed, in the order of the cells of the grid
    blocks:  the job of each copy; None: the hook does nothing there
    records: observers fire
    kept:    the activations of the pass of the gradient; None: another pass
    reached: called with the path when the hook would fire in the unedited pass
    uses_arguments: a hook reads the arguments of the call, which are not split
    rows:    the sizes of first dimensions that the values of a site, by its id, have for one copy of the batch
    """

    def __init__(self, grid: Grid, jobs: Sequence[Job]) -> None:
        self.grid, self.jobs = grid, jobs
        self.blocks: Sequence[Job | None] = (None,)
        self.records = False
        self.kept: list[Activation] | None = None
        self.reached: Callable[[str], None] | None = None
        self.uses_arguments = False
        self._runners = dict[str, SiteRunner]()
        self._ops = dict[tuple[str, int, int], Op]()
        self.rows = defaultdict[int, set[int]](set)

    def __call__(self, runner: SiteRunner) -> Op:
        """The op in place of the site's own, see `Installation`."""
        site = runner.site
        is_moved = site.hook_name == self.grid.hook.spec.name
        is_forward = site.hook_type.phase == "forward" and not site.hook_type.until_backward
        if not is_moved and (not is_forward or site.spec.action.of_call):
            return runner.op()
        if not is_moved and site.spec.action.observes:
            op = runner.op()
            return lambda value: op(value) if self.records else value
        self.uses_arguments |= site.reads_arguments
        if not is_moved:
            return partial(self._edit, site, runner.op())
        self._runners[site.path] = runner
        self._ops.clear()  # those of an earlier installation
        return partial(self._move, site)

    # ---- the moved hook --------------------------------------------------------------------------------------------

    def _move(self, site: HookSite, value: Any) -> Any:
        if self.kept is not None:
            return self._keep(site, value)
        if self.reached is not None:
            self.reached(site.path)
            self._note_rows(site, value)
            return value
        ops = [
            self.op(job.hook, site.path, job.seed)
            if job is not None and site.path in job.cell.paths and _is_call_of(job, site)
            else None
            for job in self.blocks
        ]
        if not any(ops):
            return value
        site.fired += 1
        return self._by_block(site, value, ops)

    def op(self, hook: PlannedHook, path: str, seed: int) -> Op:
        """What the hook does at the module."""
        key = path, id(hook), seed
        if key not in self._ops:
            self._ops[key] = self._runners[path].variant(hook, seed)
        return self._ops[key]

    def _keep(self, site: HookSite, value: Any) -> Any:
        """Pass on a copy of the value, with respect to which the metric is differentiated."""
        assert self.kept is not None
        held = list[Tensor]()

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                held.append(leaf.clone() if leaf.requires_grad else leaf.detach().clone().requires_grad_())
                return held[-1]
            return leaf

        own = rebuild(value, copied)
        plain = rebuild(own, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
        self.kept.append(Activation(site, plain, held, site.clock.tokens(), site.call))
        # what follows may write into it
        return rebuild(own, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    # ---- other hooks -----------------------------------------------------------------------------------------------

    def _edit(self, site: HookSite, op: Op, value: Any) -> Any:
        if self.reached is not None:
            self._note_rows(site, value)
        return op(value) if len(self.blocks) == 1 else self._by_block(site, value, [op] * len(self.blocks))

    # ---- copies of the batch ---------------------------------------------------------------------------------------

    def _note_rows(self, site: HookSite, value: Any) -> None:
        self.rows[id(site)].update(
            leaf.shape[0] for leaf in members(value) if isinstance(leaf, Tensor) and leaf.dim()
        )

    def _by_block(self, site: HookSite, value: Any, ops: Sequence[Op | None]) -> Any:
        """The value after each op has run on its copy."""
        if len(ops) == 1:
            return ops[0](value) if ops[0] is not None else value
        olds = parts_of(value, len(ops), self.rows[id(site)])
        run = site.calls.now if site.calls is not None else None
        drawn = None if run is None else run.drawn.copy()
        news = list[Any]()
        for op, old in zip(ops, olds, strict=True):
            if run is not None and drawn is not None:  # each copy draws what a pass of its own would draw
                run.drawn.clear()
                run.drawn.update(drawn)
            news.append(old if op is None else op(old))
        return _joined(value, olds, news)


def _is_call_of(job: Job, site: HookSite) -> bool:
    """Whether the job edits the current call of the module."""
    calls = job.hook.spec.keys.when.call
    return calls is None or site.call in calls


# ---- copies of a batch in one value --------------------------------------------------------------------------------


def parts_of(value: Any, parts: int, rows: set[int]) -> list[Any]:
    """The value for each copy of the batch. ValueError if its tensors do not hold one part after the other.

    rows: the sizes of the first dimension that a tensor for one copy may have
    """
    pieces = [_pieces(leaf, parts, rows) for leaf in members(value)]
    return [_with(value, own) for own in (zip(*pieces, strict=True) if pieces else [()] * parts)]


def _pieces(leaf: Any, parts: int, rows: set[int]) -> Sequence[Any]:
    """The part of a tensor for each copy; a tensor that is the same for all of them, and what is not a tensor."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or not rows:
        return [leaf] * parts
    one, several = leaf.shape[0] in rows, leaf.shape[0] % parts == 0 and leaf.shape[0] // parts in rows
    if one == several:
        raise ValueError(f"a tensor of shape {list(leaf.shape)} for {parts} copies of the batch")
    return leaf.chunk(parts) if several else [leaf] * parts


def _joined(value: Any, olds: Sequence[Any], news: Sequence[Any]) -> Any:
    """The value with the new parts, each the same object as the old one where nothing has changed."""
    columns = zip(*map(members, olds), strict=True), zip(*map(members, news), strict=True)
    leaves = list[Any]()
    for leaf, before, after in zip(members(value), *columns, strict=True):
        changed = any(new is not old for new, old in zip(after, before, strict=True))
        if changed and before[0] is leaf:
            raise ValueError("a tensor that all copies of the batch share would change")
        leaves.append(torch.cat(after) if changed else leaf)
    return _with(value, leaves)


def _with(value: Any, leaves: Iterable[Any]) -> Any:
    """The value with other members that are not containers."""
    rest = iter(leaves)
    return rebuild(value, lambda leaf: next(rest))
