"""`record`: hooks in a user's own loop, with a run directory and a report; and the base class of the callbacks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import Tensor, distributed, nn, stack

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.prove.trial import Plan, compile_plan, locate_batch
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.install import note_call
from hookrun.engine.spec import Spec
from hookrun.engine.values.containers import tensors
from hookrun.errors import HookrunError, HookrunWarning, listed, reason
from hookrun.report import try_report
from hookrun.run.experiment.run_values import RunValues
from hookrun.run.passes.batches import Batch
from hookrun.run.passes.endings import ending, hook_facts, model_facts, print_failure, set_failed
from hookrun.run.passes.sink import RunSink
from hookrun.store.bundles import with_bundle
from hookrun.store.files import StoreError
from hookrun.store.format import ENV, HOOKS, LEASE, LOCK, MODEL, PLAN, RECORDED
from hookrun.store.lock import sole_writer
from hookrun.store.reader import open_run
from hookrun.store.records import MOST_COUNT, MOST_NAME
from hookrun.store.run_dir import RunDir, environment, outputs_folder, update_latest

if TYPE_CHECKING:
    from torch.amp import GradScaler

MOST_METRICS = 900
"""The largest number of metrics in one line of metrics.jsonl."""
_SHOWN = 4


class Recording(Installation):
    """An installation that writes a run directory: captures, metrics, records, and a report at the end.

    path:  the run directory
    split: the split of the batches, `train` or `val`, for captures; None: not known

    Rows of captures have the ids in `samples`, if the loop sets them. Otherwise they are numbered from 0 in the order
    in which the model is called with them, which in one pass over unshuffled data is their index. A loop may call
    parts of the model instead: the rows of each hooked module are numbered in the order in which it gets them.

    When the block is left, the status is `done`, or `stopped` if a check with policy `stop` failed, or `failed` or
    `interrupted` if an exception ended the block. A child that was forked inside the block writes nothing: what its
    hooks see is not recorded, and when it leaves the block, only its own hooks are removed.

    trains: the model is trained; if false, hooks that need a backward pass or training mode are not reported as
            inactive
    latest: let the link `latest` beside the directory point to it
    """

    _stacklevel = 3

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        path: Path,
        *,
        effects: bool = False,
        scaler: GradScaler | None = None,
        strict: bool = False,
        restored: Collection[str] = (),
        trains: bool = True,
        latest: bool = False,
    ) -> None:
        self.path = path
        self._latest = latest
        self._trains = trains
        self._run_dir = RunDir(path)
        self._rows = RunSink(self._run_dir, print)
        self._counts = True
        self._is_open = False
        self._called_in: int | None = None  # the step of the model's latest call
        self._lock = ExitStack()
        super().__init__(
            plan,
            model,
            sink=self._rows,
            effects=effects,
            scaler=scaler,
            standalone=True,
            strict=strict,
            restored=restored,
            locate=locate_batch,
        )
        self._hooked_in = dict[nn.Module, list[nn.Module]]()
        self.clock.calls.begins.append(partial(note_call, WeakMethod(self._begin_batch)))

    def __enter__(self) -> Recording:
        """Create the directory and install the hooks. StoreError if it is not empty or another run writes to it."""
        self._owner = os.getpid()
        self._lock.enter_context(sole_writer(self.path))
        names = sorted({entry.name for entry in self.path.iterdir()} - {LEASE, LOCK})
        if names:
            self._lock.close()
            raise StoreError(
                f"{self.path} is not empty: it has {listed(names, _SHOWN)}. Choose another directory (run_dir)"
            )
        self._is_open = True
        note = update_latest(self.path) if self._latest else None
        if note:
            print(note)
        try:
            run_dir = self._run_dir
            run_dir.set_status("running")
            run_dir.write(PLAN, self.plan.to_dict())
            tensors_of_model = chain(self._model.parameters(), self._model.buffers())
            device = str(next((tensor.device for tensor in tensors_of_model), "cpu"))
            run_dir.write(ENV, {**environment(device=device), RECORDED: True})
            run_dir.write(MODEL, model_facts(self._model))
            super().__enter__()
        except BaseException as error:
            self._finish(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks and write the remaining data, the status and the report."""
        if os.getpid() != self._owner:
            self._remove()
            return
        try:
            if kind is None:
                self._warn_of_unknown()
            super().__exit__(kind, error, trace)
        except BaseException as idle:  # under `strict`: hooks that did nothing
            self._finish(idle)
            raise
        self._finish(error)

    def _warn_of_unknown(self) -> None:
        """Warn of captures that should have a row for each sample, and have one for each firing."""
        for hook, modules in self._rows.without_batch.items():
            where = listed([path or "(root)" for path in modules], _SHOWN)
            warnings.warn(
                f"{hook} has captured a row for each firing on {where}, not for each sample: it is not known which "
                f"dimension is the batch, or that is not as long as there are samples; say it by batch_dim in "
                f"hooks.{hook}, and set hooks.samples before each batch",
                HookrunWarning,
                stacklevel=self._stacklevel,
            )

    def log(
        self, *, step: int | None = None, epoch: int | None = None, split: str | None = None, **values: Any
    ) -> None:
        """Append a line to metrics.jsonl: ``hooks.log(loss=loss, accuracy=0.9)``.

        values: numbers, or tensors []; may be NaN or infinite
        step:   by default that of the model's latest call, also after `optimizer.step()`
        epoch:  by default the hooks' current epoch
        split: by default `train` if the model is in training mode, else `val`

        HookrunError for anything else, naming the key.
        """
        if not self._is_open:
            raise HookrunError(
                f"log: the run in {self.path} has not begun or has ended: call it inside the `with` block"
            )
        at: dict[str, Any] = {
            "split": "train" if self.clock.mode == "train" else "val",
            "epoch": self.clock.epoch,
            "step": self.clock.step if self._called_in is None else self._called_in,
        }
        if split is not None:
            at["split"] = split_name(split)
        if epoch is not None:
            at["epoch"] = clock_value("epoch", epoch)
        if step is not None:
            at["step"] = clock_value("step", step)
        if not values or len(values) > MOST_METRICS:
            raise HookrunError(f"log: found {len(values)} metrics, expected 1 to {MOST_METRICS}")
        numbers = {name: metric_value(name, value) for name, value in values.items()}
        self._run_dir.log_metrics(**at, **numbers)
        self.sink.settle()

    @property
    def captures(self) -> Mapping[str, Mapping[str, Any]]:
        """Hook -> module -> StoredCapture, read from disk; pending captures are written first."""
        if self._is_open:
            self._run_dir.flush()
        return open_run(self.path).captures

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of print, stats and check, in order, read from disk."""
        if self._is_open:
            self.sink.settle()
        return open_run(self.path).stats

    @property
    def split(self) -> str | None:
        """The split of the batches."""
        return self._rows.split

    @split.setter
    def split(self, part: str | None) -> None:
        if part not in (None, "train", "val"):
            raise HookrunError(f"split: found {part!r}, expected 'train', 'val' or None")
        self._rows.split = part  # type: ignore[assignment]

    def _title(self) -> str:
        return f"{super()._title()}; recorded in {self.path}"

    def is_on(self, model: nn.Module) -> bool:
        """Whether the hooks are installed on this model, or on a model that it wraps."""
        return any(module is self._model for module in model.modules())

    def number_rows(self, count: int) -> None:
        """A batch of `count` samples begins: for loops that do not call the model itself, but its modules."""
        self._counts = False
        self._rows.number(count)

    @property
    def numbered(self) -> int:
        """How many rows were numbered so far; set it to 0 at the beginning of a pass over the data."""
        return self._rows.numbered

    @numbered.setter
    def numbered(self, count: int) -> None:
        self._rows.number_from(count)

    def begin_forward(self) -> None:
        """Count the calls of each module from 0 again, which each outermost call of the model or a part does too."""
        self.clock.calls.forward.numbers.clear()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context in which hooks act as before, but record nothing, and nothing is counted.

        They must act: a graph that is compiled without them would never have them.
        """
        before = self._rows.muted
        step = self.clock.step
        epoch = self.clock.epoch
        self._rows.muted = True
        try:
            with self.uncounted():
                yield
        finally:
            self._rows.muted = before
            self.clock.step = step
            self.clock.epoch = epoch

    def _begin_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Number the rows of a forward; passes that continue a generation have the rows of its prompts."""
        self._model_ran = True
        if not self._counts:
            return
        passes = self.clock.passes
        continues = passes is not None and passes.continues(module, args, kwargs)
        if not continues:
            self.clock.count_batch(module)
        self._called_in = self.clock.step
        size = batch_size((args, kwargs), self.batch_of_calls.get(module))
        if continues or size is None:
            return
        if module not in self._hooked_in:
            hooked = {site.module for site in self.sites}
            self._hooked_in[module] = [inner for inner in module.modules() if inner in hooked]
        self._rows.number(size, self._hooked_in[module])

    @property
    def unexplained(self) -> list[tuple[str, str, str]]:
        """`inactive` without the hooks that could not fire: nor those that wait for a training, if there is none."""
        unexplained = super().unexplained
        if self._trains:
            return unexplained
        waiting = set[str]()
        for hook in self.plan.hooks:
            kind = hook.spec.hook_type
            if kind.needs_backward or kind.phase == "step" or hook.spec.keys.when.mode == "train":
                waiting.add(hook.spec.name)
        return [(hook, path, why) for hook, path, why in unexplained if hook not in waiting]

    def _finish(self, error: BaseException | None) -> None:
        """Write the remaining data, the manifest and the status, with the error of the block, which is not raised."""
        run_dir = self._run_dir
        last = (
            self.sink.settle,
            run_dir.flush,
            lambda: run_dir.write(HOOKS, hook_facts(self)),
            lambda: run_dir.write_folds(self.folds),
            run_dir.close,
        )
        try:
            if error is not None:
                for write in last:
                    print_failure(write)
                print_failure(partial(set_failed, run_dir, error))
                return
            with ending(*last):
                pass
            run_dir.write_manifest()
            run_dir.set_status("stopped" if self.sink.stop else "done", self.sink.stop or "")
        except BaseException as failure:
            print_failure(partial(set_failed, run_dir, failure if error is None else error))
            raise
        finally:
            self._is_open = False
            self._lock.close()
            try_report(self.path)


def batch_size(batch: Any, dim: int | None = None) -> int | None:
    """The size of a dimension, by default the first, of the first tensor in a batch that has it; None: none has."""
    dim = dim or 0
    for tensor in tensors(batch):
        if tensor.dim() > dim:
            return tensor.shape[dim]
    return None


def run_folder(path: str | os.PathLike[str] | None) -> Path:
    """The directory of a new run: `path`, or by default one named by the time, as on the command line.

    HookrunError for what the system cannot have as a path.
    """
    if path is not None:
        try:
            folder = Path(path).expanduser().absolute()
            with suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(folder)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise HookrunError(
                f"run_dir: {path!r:.200} cannot be a directory: {reason(error):.300}"
            ) from error
        return folder
    return outputs_folder() / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


def metric_value(name: str, value: Any) -> int | float:
    """The value of a metric as a Python number. HookrunError, naming the metric, for anything but one number."""
    if len(name) > MOST_NAME:
        raise HookrunError(f"log: a name of {len(name):,} characters, at most {MOST_NAME:,} are kept")
    number = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        try:
            number = value.item()
        except RuntimeError as error:  # a meta tensor
            raise HookrunError(f"log: {name}: its value cannot be read: {error}") from error
    if not isinstance(number, int | float):
        what = f"a {type(value).__name__}"
        hint = "log numbers only"
        shape = getattr(value, "shape", None)
        if shape is not None:
            what += f" of shape {list(shape)}"
            hint = "log one number, for example its mean"
        raise HookrunError(
            f"log: {name}: found {what}, expected a number or a tensor of no dimensions: {hint}"
        )
    if isinstance(number, int) and abs(number) > MOST_COUNT:
        raise HookrunError(f"log: {name}: a whole number beyond 2**53 is not kept exactly: log it as a float")
    return number


def clock_value(name: str, value: Any) -> int:
    """A step or an epoch. HookrunError if it is not an integer of at least 0."""
    number = metric_value(name, value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise HookrunError(f"log: {name}: found {value!r}, expected a whole number from 0")
    return number


def split_name(split: Any) -> str:
    """The split. HookrunError if it is not a short text."""
    if not isinstance(split, str) or len(split) > MOST_NAME:
        raise HookrunError(
            f"log: split: found {split!r:.100}, expected a short text such as 'train' or 'val'"
        )
    return split


Samples = Callable[[Any], Tensor | Sequence[int] | None]


class LoopFollower:
    """Installs the hooks for each run of a loop, each with its own run directory.

    hooks:     the recording of the current or last run: `captures`, `records`, `fired`, `path`
    following: the recording of the current run; None between runs
    run_dirs:  the directories of all runs so far

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
        self.spec = spec if isinstance(spec, Spec) else with_bundle(spec)
        self.run_dir = run_dir
        self.run_dirs = list[Path]()
        self.hooks: Recording | None = None
        self.following: Recording | None = None
        self._samples = samples
        self._options = {"effects": effects, "strict": strict}
        self._may_stop = any(hook.action.value_of(Meaning.POLICY) == "stop" for hook in self.spec.hooks)
        self._applied = WeakKeyDictionary[nn.Module, list[str]]()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooks": None, "following": None, "_applied": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _applied=WeakKeyDictionary())

    def begin(self, model: nn.Module, scaler: GradScaler | None = None, *, trains: bool = True) -> Recording:
        """Open a run directory and install the hooks on the model.

        `apply` hooks that have acted on the model before do not act again.
        """
        if self.following is not None:
            self.end(HookrunError("another run began before this one had ended"))
        plan = compile_plan(self.spec, model, values=RunValues())
        hooks = Recording(
            plan,
            model,
            self._folder(),
            scaler=scaler,
            restored=self._applied.get(model, ()),
            trains=trains,
            latest=self.run_dir is None,
            **self._options,
        )
        hooks.__enter__()
        self.hooks = self.following = hooks
        self.run_dirs.append(hooks.path)
        self._applied[model] = plan.applied()
        return hooks

    def end(self, error: BaseException | None = None) -> None:
        """Remove the hooks and end the run. error: the exception that ended the loop, if any."""
        hooks = self.following
        self.following = None
        if hooks is None:
            return
        if error is None:
            hooks.__exit__(None, None, None)
        else:
            hooks.__exit__(type(error), error, error.__traceback__)

    def batch(self, batch: Any, split: str | None) -> None:
        """Called when a batch begins. split: `train`, `val` or None."""
        hooks = self.following
        if hooks is None:
            return
        ids: Tensor | Sequence[int] | None = None
        population = None
        if isinstance(batch, Batch):
            split = batch.split
            ids = batch.ids
            population = batch.population
        hooks.split = split
        hooks.samples = self._samples(batch) if self._samples else ids
        hooks.population = population
        size = batch_size(batch)
        if hooks.samples is None and size is not None:
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
        step = hooks.clock.step
        accumulating = hooks.accumulating
        numbered = hooks.numbered
        hooks.clock.training_at = step
        hooks.clock.step = 0
        hooks.accumulating = False
        hooks.numbered = 0
        try:
            yield
        finally:
            hooks.clock.training_at = None
            hooks.clock.step = step
            hooks.accumulating = accumulating
            hooks.numbered = numbered

    def evaluated_batch(self) -> None:
        """Called when a batch of an evaluation ends."""
        if self.following is not None:
            self.following.clock.step += 1

    def add_loss(self, part: Any) -> None:
        """Called after each micro-batch of a training. part: what it adds to the loss of the step; None: not known."""
        if self.following is not None and part is not None:
            losses = self.following.clock.losses
            self.following.loss = part
            losses[:] = [stack(losses).sum(0)]

    def write(self, split: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write the numbers in `values` as a line of metrics.jsonl; their names may be any text."""
        hooks = self.following
        numbers: dict[str, Any] = {}
        for name, value in values.items():
            if _is_number(value):
                # a name that is a key which hookrun writes into each line gets a prefix
                numbers[f"logged_{name}" if name in ("split", "epoch", "step") else name] = value
        if hooks is not None and numbers:
            hooks.log(split=split, step=hooks.clock.step if step is None else step, **numbers)

    @property
    def stops(self) -> bool:
        """Whether a check with policy `stop` has failed."""
        return self._may_stop and self.following is not None and self.following.stopped is not None

    def _folder(self) -> Path:
        path = run_folder(self.run_dir)
        if self.run_dir is not None and self.run_dirs:
            path = path.with_name(f"{path.name}-{len(self.run_dirs) + 1}")
        if not distributed.is_available() or not distributed.is_initialized():
            return path
        if distributed.get_world_size() == 1:
            return path
        return path / f"rank{distributed.get_rank()}"


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0
