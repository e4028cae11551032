"""What each hook does in a pass over several copies of a batch, of which each belongs to another cell of the grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.plan.plan import PlannedHook
from hookrun.runtime.apply_action import Op
from hookrun.runtime.site import HookSite
from hookrun.runtime.tokens.calls import Pass
from hookrun.runtime.wiring import Variant
from hookrun.spec import Spec
from hookrun.tasks.effects.grid import Cell
from hookrun.tasks.run.prepare import structure
from hookrun.values.containers import members, rebuild


class CannotSplit(Exception):
    """The tensors of a value do not consist of one part for each copy of the batch."""


@dataclass(frozen=True)
class Job:
    """One pass over the data.

    kind:   exact, or placebo
    number: of the seed, or of the placebo
    cell:   the number of the cell
    paths:  the modules that are hooked
    hook:   the hook there
    seed:   what the random numbers of the hook are derived from, unless it has a seed of its own
    """

    kind: str
    number: int
    cell: int
    paths: tuple[str, ...]
    hook: PlannedHook
    seed: int


@dataclass
class Activation:
    """A value that the hook sees in the pass of the gradient.

    value:   as it is without the hook
    tensors: its floating-point tensors, from which on the pass is differentiated
    """

    path: str
    value: Any
    tensors: list[Tensor]
    of_pass: Pass | None
    call: int


class Moved:
    """Decides for each hook what it does in the current pass. Between passes nothing but observers fires.

    The moved hook does what its jobs say, each for its copy of the batch; other edits run on each copy by itself,
    with the same random numbers; observers see the pass without the hook only.

    name:    of the hook that is moved
    blocks:  the job of each copy; None: the hook does nothing there
    records: observers fire
    kept:    the activations of the pass of the gradient; None: another pass
    reached: called with the path when the hook would fire in the unedited pass
    trial:   every hook of this list is tried at each of its modules
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: Sequence[Job | None] = (None,)
        self.records = False
        self.kept: list[Activation] | None = None
        self.reached: Callable[[str], None] | None = None
        self.trial: Sequence[Cell] = ()
        self.sites = dict[str, HookSite]()
        self._others = dict[tuple[str, str], HookSite]()
        self._variants = dict[str, Variant]()
        self._ops = dict[tuple[str, int, int], Op]()
        self._rows = dict[int, set[int]]()

    def around(self, site: HookSite, op: Op, variant: Variant) -> Op:
        """The op in place of the site's own, see `Installation`."""
        if site.hook_name == self.name:
            self.sites[site.path], self._variants[site.path] = site, variant
            self._ops.clear()  # those of an earlier installation
            return partial(self._try if self.trial else self._move, site)
        if site.hook_type.phase != "forward" or site.hook_type.until_backward:
            return op
        if site.spec.action.observes:
            return lambda value: op(value) if self.records else value
        self._others[site.hook_name, site.path] = site
        return partial(self._edit, site, op)

    @property
    def uses_arguments(self) -> bool:
        """Whether a hook reads the arguments of the call, which are not split."""
        return any("args" in site.spec.action.uses for site in (*self.sites.values(), *self._others.values()))

    # ---- the moved hook --------------------------------------------------------------------------------------------

    def _move(self, site: HookSite, value: Any) -> Any:
        if self.kept is not None:
            return self._keep(site, value)
        if self.reached is not None:
            self.reached(site.path)
            self._note_rows(site, value)
            return value
        ops = [
            self.op(job.hook, site.path, job.seed) if job is not None and site.path in job.paths else None
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
            self._ops[key] = self._variants[path](hook, seed)
        return self._ops[key]

    def _try(self, site: HookSite, value: Any) -> Any:
        """Every cell of this module, each on the value without the hook."""
        tried = set[str]()
        for cell in self.trial:
            if site.path in cell.paths:
                form = json.dumps(structure(Spec((cell.hook.spec,))), default=str)
                if form not in tried:
                    tried.add(form)
                    self._variants[site.path](cell.hook, 0)(value)
        return value

    def _keep(self, site: HookSite, value: Any) -> Any:
        """Pass on a copy of the value, with respect to which the metric is differentiated."""
        assert self.kept is not None
        held = list[Tensor]()

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            held.append(leaf.clone() if leaf.requires_grad else leaf.detach().clone().requires_grad_())
            return held[-1].clone()  # what follows may write into it

        passed = rebuild(value, copied)
        tensors = iter(held)
        plain = rebuild(
            value,
            lambda leaf: (
                next(tensors).detach() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            ),
        )
        passes = site.clock.passes
        of_pass = None if passes is None else passes.current
        self.kept.append(Activation(site.path, plain, held, of_pass, site.call))
        return passed

    # ---- other hooks -----------------------------------------------------------------------------------------------

    def _edit(self, site: HookSite, op: Op, value: Any) -> Any:
        if self.reached is not None:
            self._note_rows(site, value)
        return op(value) if len(self.blocks) == 1 else self._by_block(site, value, [op] * len(self.blocks))

    # ---- copies of the batch ---------------------------------------------------------------------------------------

    def _note_rows(self, site: HookSite, value: Any) -> None:
        """Remember the sizes of first dimensions for one copy."""
        sizes = self._rows.setdefault(id(site), set())
        sizes.update(leaf.shape[0] for leaf in members(value) if isinstance(leaf, Tensor) and leaf.dim())

    def new_batch(self) -> None:
        """Forget the sizes of the last batch."""
        self._rows.clear()

    def _by_block(self, site: HookSite, value: Any, ops: Sequence[Op | None]) -> Any:
        """The value after each op has run on its copy."""
        if len(ops) == 1:
            return ops[0](value) if ops[0] is not None else value
        split = Split(value, len(ops), self._rows.get(id(site), set()))
        run = site.calls.run if site.calls is not None else None
        drawn = None if run is None else run.drawn.copy()
        for number, op in enumerate(ops):
            if op is None:
                continue
            if run is not None and drawn is not None:  # each copy draws what a pass of its own would draw
                run.drawn.clear()
                run.drawn.update(drawn)
            split.put(number, op(split.part(number)))
        return split.whole()


@dataclass
class Split:
    """A value whose tensors hold one part after the other along the first dimension. CannotSplit if they do not.

    rows: the sizes of the first dimension that a tensor of one part may have
    """

    value: Any
    parts: int
    rows: set[int]
    _new: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._leaves = members(self.value)
        self._split = [self._grows(leaf) for leaf in self._leaves]

    def _grows(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return False
        rows, rest = divmod(leaf.shape[0], self.parts)
        one, several = leaf.shape[0] in self.rows, not rest and rows in self.rows
        if one == several:
            raise CannotSplit(f"a tensor of shape {list(leaf.shape)} for {self.parts} copies of the batch")
        return several

    def part(self, number: int) -> Any:
        """One part of the value."""
        parts = iter(
            [
                self._part(leaf, number) if split else leaf
                for leaf, split in zip(self._leaves, self._split, strict=True)
            ]
        )
        own = list(parts)
        self._new[number] = own
        news = iter(own)
        return rebuild(self.value, lambda leaf: next(news))

    def _part(self, leaf: Tensor, number: int) -> Tensor:
        rows = leaf.shape[0] // self.parts
        return leaf[number * rows : (number + 1) * rows]

    def put(self, number: int, new: Any) -> None:
        """Replace one part by what an op made of it."""
        olds, news = self._new[number], members(new)
        for place, (old, leaf, split) in enumerate(zip(olds, news, self._split, strict=True)):
            if leaf is not old and not split:
                raise CannotSplit("a tensor that all copies of the batch share would change")
            olds[place] = None if leaf is old else leaf

    def whole(self) -> Any:
        """The value with its new parts."""
        changed = list[Any]()
        for place, leaf in enumerate(self._leaves):
            news = {number: own[place] for number, own in self._new.items() if own[place] is not None}
            if not self._split[place] or not news:
                changed.append(leaf)
                continue
            parts = [news.get(number) for number in range(self.parts)]
            changed.append(
                torch.cat([self._part(leaf, n) if part is None else part for n, part in enumerate(parts)])
            )
        leaves = iter(changed)
        return rebuild(self.value, lambda leaf: next(leaves))
