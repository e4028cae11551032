"""What the callbacks share: a recording for each fit or evaluation, and the clock, which follows the library's loop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from torch import Tensor, distributed, nn

from hookrun.errors import HookrunError
from hookrun.proving import compile_plan
from hookrun.recording import Recording, batch_size, run_folder
from hookrun.spec import Spec, parse_spec
from hookrun.tasks.loop.batches import Batch

if TYPE_CHECKING:
    from torch.amp import GradScaler

Samples = Callable[[Any], Tensor | Sequence[int] | None]


class NotInstalled(HookrunError, ImportError):
    """A library that an integration is for is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed: pip install 'hookrun[{extra}]'")


class LoopFollower:
    """Installs the hooks for one run after the other, each in a run directory of its own.

    hooks:    the recording of the run under way, or of the last one: `captures`, `records`, `fired`, `path`
    run_dirs: the directories of all runs so far

    spec:     the hooks: a Spec, or a dict
    run_dir:  a new or empty directory for the first run; a second run goes beside it, into ``run_dir-2``, and so on.
              None: ``outputs/`` and the time, for each run. Of several processes each has ``rank0``, … in it.
    samples:  batch -> the numbers of its samples [B]; None: they are known of `hookrun.build`'s batches alone; for
              others rows are numbered in the order of each epoch or evaluation, from 0
    """

    def __init__(
        self,
        spec: Spec | Mapping[str, Any],
        run_dir: str | os.PathLike[str] | None = None,
        *,
        samples: Samples | None = None,
        effects: bool = False,
        strict: bool = False,
    ) -> None:
        self.spec = spec if isinstance(spec, Spec) else parse_spec(spec)
        self.run_dir = run_dir
        self.run_dirs = list[Path]()
        self.hooks: Recording | None = None
        self._samples = samples
        self._effects = effects
        self._strict = strict
        self._may_stop = any(hook.action.may_stop() for hook in self.spec.hooks)
        self._open = False
        self._applied: tuple[ReferenceType[nn.Module], list[str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooks": None, "_open": False, "_applied": None}

    @property
    def following(self) -> Recording | None:
        """The recording of the run under way; None between runs."""
        return self.hooks if self._open else None

    def begin(self, model: nn.Module, scaler: GradScaler | None = None, *, trains: bool = True) -> Recording:
        """Open a run directory and install the hooks on the model. What `apply` hooks did to it before stays."""
        if self._open:
            self.end(HookrunError("another run began before this one had ended"))
        plan = compile_plan(self.spec, model)
        before = self._applied
        restored = before[1] if before is not None and before[0]() is model else []
        hooks = Recording(
            plan,
            model,
            self._folder(),
            effects=self._effects,
            scaler=scaler,
            strict=self._strict,
            restored=restored,
            trains=trains,
            latest=self.run_dir is None,
        )
        hooks.__enter__()
        self.hooks, self._open = hooks, True
        self.run_dirs.append(hooks.path)
        self._applied = ref(model), plan.applied()
        return hooks

    def end(self, error: BaseException | None = None) -> None:
        """Take the hooks off and end the run; `error` is what ended the loop."""
        hooks = self.following
        if hooks is not None:
            self._open = False
            hooks.__exit__(
                type(error) if error is not None else None,
                error,
                error.__traceback__ if error is not None else None,
            )

    def batch(self, batch: Any, split: str | None) -> None:
        """A batch begins."""
        hooks = self.following
        if hooks is None:
            return
        hooks.begin_forward()
        own = isinstance(batch, Batch)
        hooks.split = batch.split if own else split
        hooks.samples = self._samples(batch) if self._samples else batch.ids if own else None
        hooks.population = batch.population if own else None
        if hooks.samples is None and (size := batch_size(batch)) is not None:
            hooks.number_rows(size)

    def epoch(self, number: int) -> None:
        """An epoch of training begins."""
        if self.following is not None:
            self.following.clock.epoch = number
            self.following.numbered = 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A pass in evaluation mode: the clock's step counts its batches from 0, and is afterwards what it was."""
        hooks = self.following
        if hooks is None:
            yield
            return
        step, hooks.clock.step = hooks.clock.step, 0
        accumulating, hooks.accumulating = hooks.accumulating, False
        numbered, hooks.numbered = hooks.numbered, 0
        try:
            yield
        finally:
            hooks.clock.step, hooks.accumulating, hooks.numbered = step, accumulating, numbered

    def evaluated_batch(self) -> None:
        """A batch of an evaluation is over."""
        if self.following is not None:
            self.following.clock.step += 1

    def write(self, split: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """A line of metrics.jsonl of the numbers in `values`, whose names may hold anything."""
        plain = {_free(name): value for name, value in values.items() if _is_number(value)}
        if self.following is not None and plain:
            self.following.log(split=split, step=step, **plain)

    @property
    def stops(self) -> bool:
        """Whether a check with policy `stop` asks for the end of the run."""
        return self._may_stop and self.following is not None and self.following.stopped is not None

    def _folder(self) -> Path:
        path = run_folder(self.run_dir)
        if self.run_dir is not None and self.run_dirs:
            path = path.with_name(f"{path.name}-{len(self.run_dirs) + 1}")
        several = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        return path / f"rank{distributed.get_rank()}" if several else path


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


def _free(name: str) -> str:
    """The name, but for those that stand for the place of a line."""
    return re.sub(r"^(split|epoch|step)$", r"logged_\1", name)
