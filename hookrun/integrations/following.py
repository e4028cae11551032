"""The base class of the callbacks: a recording for each fit or evaluation, with the step and epoch of the loop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from torch import Tensor, distributed, nn

from hookrun.actions.fields import Meaning
from hookrun.errors import HookrunError
from hookrun.integrations.recording import Recording, batch_size, run_folder
from hookrun.prove.trial import compile_plan
from hookrun.spec import Spec, parse_spec
from hookrun.tasks.run.batches import Batch

if TYPE_CHECKING:
    from torch.amp import GradScaler

Samples = Callable[[Any], Tensor | Sequence[int] | None]


class NotInstalled(HookrunError, ImportError):
    """The library of an integration is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed: pip install 'hookrun[{extra}]'")


class LoopFollower:
    """Installs the hooks for each run of a loop, each with its own run directory.

    hooks:    the recording of the current or last run: `captures`, `records`, `fired`, `path`
    run_dirs: the directories of all runs so far

    spec:     the hooks: a Spec, or a dict
    run_dir:  a new or empty directory for the first run; the second run is written beside it, into ``run_dir-2``, and
              so on. None: ``outputs/`` and the time, for each run. With several processes each writes into ``rank0``, …
    samples:  batch -> the ids of its samples [B]; None: batches of `hookrun.build` have ids; rows of other batches are
              numbered from 0 in each epoch or evaluation
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
        self._may_stop = any(hook.action.value_of(Meaning.POLICY) == "stop" for hook in self.spec.hooks)
        self._open = False
        self._applied: tuple[ReferenceType[nn.Module], list[str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooks": None, "_open": False, "_applied": None}

    @property
    def following(self) -> Recording | None:
        """The recording of the current run; None between runs."""
        return self.hooks if self._open else None

    def begin(self, model: nn.Module, scaler: GradScaler | None = None, *, trains: bool = True) -> Recording:
        """Open a run directory and install the hooks on the model.

        `apply` hooks that have acted on the model before do not act again.
        """
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
        """Remove the hooks and end the run. error: the exception that ended the loop, if any."""
        hooks = self.following
        if hooks is not None:
            self._open = False
            trace = None if error is None else error.__traceback__
            hooks.__exit__(None if error is None else type(error), error, trace)

    def batch(self, batch: Any, split: str | None) -> None:
        """Called when a batch begins. split: `train`, `val` or None."""
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
        """Called when a training epoch begins."""
        if self.following is not None:
            self.following.clock.epoch = number
            self.following.numbered = 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for a pass in evaluation mode: steps count its batches from 0, and are restored afterwards."""
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
        """Called when a batch of an evaluation ends."""
        if self.following is not None:
            self.following.clock.step += 1

    def write(self, split: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write the numbers in `values` as a line of metrics.jsonl; their names may be any text."""
        plain = {_free(name): value for name, value in values.items() if _is_number(value)}
        if self.following is not None and plain:
            self.following.log(split=split, step=step, **plain)

    @property
    def stops(self) -> bool:
        """Whether a check with policy `stop` has failed."""
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
    """The name, changed if it is a key that hookrun writes into each line."""
    return re.sub(r"^(split|epoch|step)$", r"logged_\1", name)
