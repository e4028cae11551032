"""What each hook does in a pass over several copies of a batch, of which each belongs to another cell of the grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.calls import Pass
from hookrun.engine.values.containers import members, rebuild
from hookrun.studies.effects.circuit import KeptCells
from hookrun.studies.effects.grid import SiteGrid, Trial
from hookrun.studies.effects.parts import joined, parts_of
from hookrun.studies.effects.rest import ReplacedValue, replaced_value


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


class MovedHook:
    """Decides for each hook what it does in the current pass. Between passes nothing but observers fires.

    The moved hook does what its trials say, each for its copy of the batch; other edits run on each copy by itself,
    with the same random numbers; observers see the pass without the hook only.

    trials:    what is computed, in the order of the cells of the grid
    blocks:  the trial of each copy; None: the hook does nothing there
    records: observers fire
    kept:    the activations of the pass of the gradient; None: another pass
    on_fire: called with the path where the hook fires in the pass that is stored; None: another pass
    uses_arguments: a hook reads the arguments of the call, which are not split
    rows:    the sizes of first dimensions that the values of a site, by its id, have for one copy of the batch
    """

    def __init__(self, grid: SiteGrid, trials: Sequence[Trial]) -> None:
        self.grid = grid
        self.trials = trials
        self.blocks: Sequence[Trial | KeptCells | None] = (None,)
        self.records = False
        self.kept: list[Activation] | None = None
        self.on_fire: Callable[[str], None] | None = None
        self.uses_arguments = False
        self._runners = dict[str, SiteRunner]()
        self._ops = dict[tuple[str, int, int], Op]()
        self.rows = defaultdict[int, set[int]](set)
        # path, call and shapes, which may differ from pass to pass -> for the current batch
        self._replaced = dict[tuple[object, ...], ReplacedValue]()

    def begin(self) -> None:
        """Forget what belongs to the last batch."""
        self.rows.clear()
        self._replaced.clear()

    def __call__(self, runner: SiteRunner) -> Op:
        """The op in place of the site's own, see `Installation`."""
        site = runner.site
        is_moved = site.hook_name == self.grid.hook.spec.name
        is_forward = site.hook_type.phase == "forward" and not site.hook_type.until_backward
        if not is_moved and (not is_forward or site.spec.action.acts_on_call):
            return runner.op()
        if not is_moved and site.spec.action.observes:
            op = runner.op()
            return lambda value: op(value) if self.records else value
        self.uses_arguments |= site.reads_arguments
        if not is_moved and site.points:  # at which hooks expect all copies
            return runner.op()
        if not is_moved:
            return partial(self._edit, site, runner.op())
        self._runners[site.path] = runner
        self._ops.clear()  # those of an earlier installation
        return partial(self._move, site)

    @contextmanager
    def storing(self, *, record: bool, on_fire: Callable[[str], None]) -> Iterator[None]:
        """The pass over a batch that is stored; observers fire if `record`."""
        self.records = record
        self.on_fire = on_fire
        try:
            yield
        finally:
            self.records = False
            self.on_fire = None

    # ---- the moved hook --------------------------------------------------------------------------------------------

    def _move(self, site: HookSite, value: Any) -> Any:
        if self.kept is not None:
            return self._keep(site, value)
        if self.on_fire is not None:
            self.on_fire(site.path)
            self._note_rows(site, value)
        ops = [self._op_of(trial, site) for trial in self.blocks]
        if not any(ops):
            return value
        site.fired += 1
        return self._by_block(site, value, ops)

    def _op_of(self, trial: Trial | KeptCells | None, site: HookSite) -> Op | None:
        """What a trial does in the current call of the module, if it edits it."""
        if isinstance(trial, KeptCells):
            return partial(self._keep_cells, trial.cells, site)
        if trial is None or site.path not in trial.cell.paths:
            return None
        calls = trial.hook.spec.keys.when.call
        if calls is not None and site.call not in calls:
            return None
        return self.op(trial.hook, site.path, trial.seed)

    def op(self, hook: PlannedHook, path: str, seed: int) -> Op:
        """What the hook does at the module."""
        key = path, id(hook), seed
        if key not in self._ops:
            self._ops[key] = self._runners[path].variant(hook, seed)
        return self._ops[key]

    def _keep_cells(self, cells: frozenset[int], site: HookSite, value: Any) -> Any:
        """The value of a copy of the batch in which all cells but these are replaced."""
        shapes = [leaf.shape for leaf in members(value) if isinstance(leaf, Tensor)]
        place = site.path, site.call, *shapes
        if place not in self._replaced:
            rest = self.grid.rest
            assert rest is not None
            ops: dict[int, Op] = {}
            for cell in self.grid.cells:
                if site.path in cell.paths:
                    ops[cell.number] = self.op(rest.of(cell.hook), site.path, self.grid.prepared.plan.seed)
            self._replaced[place] = replaced_value(value, ops)
        return self._replaced[place].keeping(cells, value)

    def _keep(self, site: HookSite, value: Any) -> Any:
        """Pass on a copy of the value, with respect to which the metric is differentiated."""
        assert self.kept is not None
        copies: list[Tensor] = []

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            copies.append(leaf.clone() if leaf.requires_grad else leaf.detach().clone().requires_grad_())
            return copies[-1]

        copied = rebuild(value, copy)
        plain = rebuild(copied, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
        self.kept.append(Activation(site, plain, copies, site.clock.tokens(), site.call))
        # what follows may write into it
        return rebuild(copied, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    # ---- other hooks -----------------------------------------------------------------------------------------------

    def _edit(self, site: HookSite, op: Op, value: Any) -> Any:
        if self.on_fire is not None:
            self._note_rows(site, value)
        if len(self.blocks) == 1:
            return op(value)
        return self._by_block(site, value, [op] * len(self.blocks))

    # ---- copies of the batch ---------------------------------------------------------------------------------------

    def _note_rows(self, site: HookSite, value: Any) -> None:
        for leaf in members(value):
            if isinstance(leaf, Tensor) and leaf.dim():
                self.rows[id(site)].add(leaf.shape[0])

    def _by_block(self, site: HookSite, value: Any, ops: Sequence[Op | None]) -> Any:
        """The value after each op has run on its copy."""
        if len(ops) == 1:
            return ops[0](value) if ops[0] is not None else value
        olds = parts_of(value, len(ops), self.rows[id(site)])
        drawn: Any = {}
        if site.calls is not None and site.calls.now is not None:
            drawn = site.calls.now.drawn
        before = drawn.copy()
        news: list[Any] = []
        for op, old in zip(ops, olds, strict=True):
            # each copy draws what a pass of its own would draw
            drawn.clear()
            drawn.update(before)
            news.append(old if op is None else op(old))
        return joined(value, olds, news)
