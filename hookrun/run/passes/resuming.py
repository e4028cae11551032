"""Resumable states of a run: their content, when they are saved, and how a run continues from one.

A state has the model, the hooks, the run directory, the random generators, and the parts that the task adds with
`state_part`. The task's loop calls `point` wherever the run could be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.rng import derived_seed
from hookrun.engine.runtime.sharded import like, whole
from hookrun.engine.validation import join
from hookrun.errors import HookrunError, first_lines, spec_error
from hookrun.models.weights import change_of
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.experiment.session import generator_states, lost_generators, set_generators
from hookrun.run.experiment.task import Ready
from hookrun.run.passes.average import Average
from hookrun.run.passes.over_ranks import RANKS, folds_of, for_rank, gathered_trees, with_sums
from hookrun.signals import Interrupted, pending
from hookrun.store.background import INTERVAL, Background
from hookrun.store.captures.tensor_file import dtype_name
from hookrun.store.files import StoreError
from hookrun.store.format import CHECKPOINTS, differences, encode
from hookrun.store.named_files import named_files
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import LEAST_KEPT, SECONDS, SavedState, write_state
from hookrun.store.states.tree import NotPlain, flatten
from hookrun.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

SHARE = 10
"""Saving takes at most 1/SHARE of the time, unless it is cheap."""

CHEAP = 0.1
"""A save that takes less than this many seconds is always made."""

_FREE = {"tags", "note", "objective", "needs"}
"""Sections of the settings that may change before a run is resumed, since results do not depend on them."""

_FREE_TO_COMPUTE = ("strategy", "timeout")
"""Keys of `compute` that may change: a run may be resumed with another number of processes."""


class Resuming:
    """Saves and loads the states of one run.

    around: makes a context manager in which the model has the weights to save
    writer: writes the states of epochs, and the files that must be written before them, in the background
    notes:  why a resumed run cannot equal the unbroken one
    """

    def __init__(self, ready: Prepared, run_dir: RunDir, model: nn.Module, hooks: Installation) -> None:
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._ready = ready
        self._run_dir = run_dir
        self._model = model
        self._hooks = hooks
        self.writer = Background("hookrun states", at_once=ready.settings.data.workers > 0)
        # The parts that the task adds, by name, and in each part the sums over the rows of this rank only.
        self._parts: dict[str, tuple[Stateful, Mapping[str, Average]]] = {}
        self._checkpoint = ready.settings.train.checkpoint
        keeps_all = self._checkpoint.keep_done or self._checkpoint.keep > LEAST_KEPT
        self._pause = 0.0 if keeps_all else INTERVAL  # otherwise later states replace earlier ones anyway
        self._saved = time.monotonic()
        self._waiting = dict[str, Any]()
        self._generators: Mapping[str, Any] | None = None
        self.notes: list[str] = []
        if run_dir.resumed is not None:
            with _fitting(run_dir.resumed):
                self._load(run_dir.resumed)
            hooks.sink.stop = None  # a check that stopped the run may stop it again

    def _load(self, saved: SavedState) -> None:
        """Load model and hooks; the other parts wait for the task."""
        hooks = self._hooks
        of_batch = {hook.spec.name for hook in hooks.plan.hooks if hook.spec.hook_type.batch}
        mine = for_rank(saved.part(RANKS), self._run_dir.ranks, of_batch)
        self._waiting = with_sums(saved.part("held"), mine["sums"])
        self._generators = mine.get("generators", {})
        self.notes = lost_generators(self._generators, self._ready.device.type)
        load_model(self._model, saved.part("model"))
        # With resume_anyway the plan may have changed: the hooks in both plans are loaded.
        hooks.load_state_dict(mine["hooks"], strict=False)

    @contextmanager
    def state_part(self, name: str, part: Stateful, sums: Mapping[str, Average]) -> Iterator[bool]:
        """Within the block every state has a part `name`, with the plain values and tensors that `part` returns.

        The part is loaded from the state from which the run is resumed; yields whether this state has it.

        sums: key path in this part -> an Average over the rows of this rank only
        """
        resumed = name in self._waiting
        if resumed and self._run_dir.resumed is not None:
            with _fitting(self._run_dir.resumed):
                part.load_state_dict(self._waiting.pop(name))
        self._parts[name] = (part, sums)
        try:
            yield resumed
        finally:
            del self._parts[name]

    def begin(self) -> None:
        """Restore the random generators; call it when everything that draws random numbers has been built."""
        saved = self._run_dir.resumed
        if self._generators is None or saved is None:
            return
        with _fitting(saved):
            if self._generators:
                set_generators(self._generators)
            else:  # the run did not have this rank before
                rank = self._run_dir.ranks.rank
                torch.manual_seed(derived_seed(self._ready.settings.seed, rank, self._hooks.clock.step))
        self._generators = None

    def point(self, due: bool = False, *, in_background: bool = False) -> bool:
        """Save a state if one is due, or if a signal ends the run; call it wherever the run could be resumed.

        Every rank calls it, and all save if one of them does. Returns whether a state was saved.

        due:           a state is due here
        in_background: a state that is due here is written in another thread

        Raises the Interrupted of the signal.
        """
        run_dir = self._run_dir
        signal = pending()
        number = 0 if signal is None else signal.signum
        minutes = self._checkpoint.every.minutes
        if minutes is not None and self.seconds >= 60 * minutes:
            due = True
        number, saves, is_full = run_dir.ranks.largest([number, due or number > 0, run_dir.keeps_many])
        if is_full and not saves:
            self._hooks.sink.settle()
            run_dir.take_kept()
        if saves:
            self.save(in_background=in_background and not number)
        self.writer.put_newest(after=self._pause)
        if number:
            raise signal or Interrupted(number)
        return bool(saves)

    @property
    def seconds(self) -> float:
        """Seconds since the last state, or since the run began."""
        return time.monotonic() - self._saved

    def save(self, *, in_background: bool = False) -> None:
        """Save a state; every rank calls it, and rank 0 writes. HookrunError if a part cannot be saved.

        in_background: write it in another thread
        """
        try:
            with self.around():
                tree = self._tree()
                if self._run_dir.ranks.is_main:
                    clock = self._hooks.clock
                    at = encode({"epoch": clock.epoch, "step": clock.step})
                    values, tensors = flatten(tree)
                    write = partial(self._write, f'{self._about[:-1]}, "at": {at}}}', values)
                    self.writer.write(CHECKPOINTS, tensors, write, soon=in_background)
                    states = [state["hooks"] for state in tree[RANKS]]
                    self._run_dir.write_folds(folds_of(self._hooks, states))
        except NotPlain as error:
            raise HookrunError(
                f"a resumable state of the run cannot be saved: {error}; train.checkpoint.every=null saves no states"
            ) from error
        self._saved = time.monotonic()

    def _tree(self) -> dict[str, Any]:
        """The content of a state; every rank calls it."""
        ranks = self._run_dir.ranks
        generators = {**generator_states(), "device": self._ready.device.type}
        hooks = self._hooks.state_dict()
        sums_of_rank: dict[str, Any] = {}
        for name, (_, sums) in self._parts.items():
            for place, average in sums.items():
                sums_of_rank[f"{name}.{place}"] = average.state_dict()
        mine = {"generators": generators, "hooks": hooks, "sums": sums_of_rank}
        self._run_dir.take_kept()
        return {
            "held": {name: part.state_dict() for name, (part, _) in self._parts.items()},
            "model": model_state(self._model, trains=self._ready.task.trains),
            "files": self._run_dir.position(),
            RANKS: gathered_trees(ranks, mine) if ranks.several else [mine],
        }

    @cached_property
    def _about(self) -> str:
        """The description of the run in each state, as JSON."""
        return encode(about(self._ready, self._run_dir.path))

    def _write(self, about: str, values: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self._run_dir.sync()
        write_state(self._run_dir.path, about, values, tensors, keep=self._checkpoint.keep)


class Results:
    """The results of an analysis by part, saved as it goes, so that a resumed run does not compute a part again.

    found: the parts of an earlier process of the run, whose lines are in metrics.jsonl already
    save:  writes a resumable state with the parts; None: no state is written
    """

    def __init__(
        self, found: Mapping[str, Any] | None = None, save: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._parts = dict(found or {})
        self._save = save
        self._saved = time.monotonic()
        self._cost = 0.0

    def get(self, name: str) -> Any:
        """The part; None if it has not been computed yet."""
        return self._parts.get(name)

    def add(self, name: str, part: Any, *, is_whole: bool = True) -> None:
        """Add a part, after its lines were written to metrics.jsonl, and save unless that would take too much time.

        is_whole: False for an intermediate result, which is saved only at regular intervals
        """
        self._parts[name] = part
        start = time.monotonic()
        seconds = start - self._saved
        is_cheap = self._cost < CHEAP or seconds >= SHARE * self._cost
        if self._save is None or not (seconds >= SECONDS or (is_whole and is_cheap)):
            return
        self._save(self._parts)
        self._saved = time.monotonic()
        self._cost = self._saved - start


def results_of(ready: Ready, run_dir: RunDir) -> Results:
    """The results of an analysis so far, which are saved in states."""
    saved = run_dir.resumed.part("results") if run_dir.resumed is not None else {}
    facts, keep = encode(about(ready, run_dir.path)), ready.settings.train.checkpoint.keep

    def save(parts: dict[str, Any]) -> None:
        content = flatten({"results": parts, "files": run_dir.position()})
        run_dir.sync()
        write_state(run_dir.path, facts, *content, keep=keep)

    return Results(saved, save)


def about(ready: Ready, run: Path) -> dict[str, Any]:
    """The configuration, model and files that must not change for a run to be resumed in the directory `run`."""
    settings = ready.settings.model_dump(mode="json", serialize_as_any=True, exclude=_FREE)
    del settings["train"]["checkpoint"]
    for key in _FREE_TO_COMPUTE:
        del settings["compute"][key]
    settings["task"] = {"name": ready.task.name, **settings["task"]}
    facts: dict[str, Any] = {"hookrun": __version__, "torch": str(torch.__version__), **settings}
    if isinstance(ready, Prepared):
        plan = ready.plan
        plan_facts = plan.to_dict()
        facts["hooks"] = {hook.pop("name"): hook for hook in plan_facts.pop("hooks")}
        del plan_facts["hash"]
        del plan_facts["seed"]
        facts["plan"] = plan_facts
        added = {join(owner, name) for owner, name in plan.added()}
        facts["parameters"] = {
            name: f"{dtype_name(parameter.dtype)} {list(parameter.shape)}"
            for name, parameter in ready.model.named_parameters()
            if name not in added
        }
    facts["files"] = named_files({**settings, "hooks": facts.get("hooks")}, run)
    return facts


def require_same(saved: SavedState, ready: Ready, run: Path) -> None:
    """Raise SpecError with a line for each difference between the run of the state and the run that would resume it."""
    lines: list[str] = []
    for key, before, now in differences(saved.about, about(ready, run)):
        if key.startswith("files."):
            lines.append(f"{key.removeprefix('files.')}: its content has changed")
        elif not key.startswith("at."):
            lines.append(f"{key}: {shown(before)} then, {shown(now)} now")
    if lines:
        listed = "\n".join(f"    {line}" for line in first_lines(lines))
        raise spec_error(
            "resume",
            f"{saved.path} is of another run:\n{listed}",
            "undo the change, or type resume_anyway=true: the results will differ from those of the original run",
        )


def shown(value: Any) -> str:
    """The value in an error message, cut if it is long."""
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def model_state(model: nn.Module, *, trains: bool) -> dict[str, Any]:
    """The parts of the model that a run changes: weights and buffers if it trains, otherwise only buffers.

    Sharded parameters are gathered, so every rank has to call it.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if not trains:
        return {"buffers": buffers}
    return {
        "state": {name: whole(each) for name, each in model.state_dict().items()},
        "buffers": buffers,
        "trained": [name for name, each in model.named_parameters() if each.requires_grad],
    }


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state of `model_state` into the model."""
    if "state" in state:
        present = model.state_dict()
        loaded: dict[str, Any] = {}
        for name, value in state["state"].items():
            if name in present and (change := change_of(value, present[name])):
                raise StoreError(f"the state has another kind of number: {name!r} is {change}")
            loaded[name] = like(value, present.get(name))
        model.load_state_dict(loaded)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in state["trained"])
    for name, saved in state["buffers"].items():
        path, _, last = name.rpartition(".")
        module = nn.Module.get_submodule(model, path)
        buffer = module._buffers[last]
        fits = buffer is not None and buffer.shape == saved.shape and buffer.dtype == saved.dtype
        if buffer is not None and fits and 0 not in buffer.stride():  # an expanded buffer cannot be written
            buffer.copy_(saved)
        else:  # a module may replace a buffer by another tensor at any time
            near = (buffer, *module.parameters(), *model.parameters())
            device = next((tensor.device for tensor in near if tensor is not None), saved.device)
            module._buffers[last] = saved.to(device)


@contextmanager
def _fitting(saved: SavedState) -> Iterator[None]:
    """Turn errors of the block into a StoreError that says that the state does not fit the run."""
    try:
        yield
    except HookrunError:
        raise
    except Exception as error:  # any error of torch, of a user's optimizer or schedule, or of a damaged file
        text = str(error).strip() or type(error).__name__
        raise StoreError(f"{saved.path} does not fit this run: {text.splitlines()[0]}") from error
