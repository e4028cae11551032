"""Installs a plan's hooks as a context manager, from which the user reads captures, records and counts."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn

from hookrun.engine.actions.base import remove_parameter, was_added
from hookrun.engine.collector import collector_paused
from hookrun.engine.html import MOST_ROWS, Shown, View
from hookrun.engine.plan.plan import PlannedHook, ResolvedPlan, lies_in, uncompilable
from hookrun.engine.runtime.clock import Clock
from hookrun.engine.runtime.fast.direct_calls import call_through_torch
from hookrun.engine.runtime.graph_backend import observing
from hookrun.engine.runtime.optimizers import follow
from hookrun.engine.runtime.records import Memory
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.calls import CallTokens
from hookrun.engine.runtime.wiring import ReplaceOp, Wiring
from hookrun.engine.values.folded import Folded
from hookrun.engine.values.tensors import whole_numbers
from hookrun.errors import (
    CompileError,
    HookrunError,
    HookrunWarning,
    Lookup,
    Problem,
    counted,
    listed,
    refuse,
)

if TYPE_CHECKING:
    from torch.amp import GradScaler


_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes of torch.compile that record CUDA graphs."""

_CUDA_GRAPHS_BACKEND = "cudagraphs"
_CUDA_GRAPHS_OPTION = "triton.cudagraphs"
"""The option of torch.compile that records CUDA graphs."""

changing = threading.RLock()
"""Held while hooks are installed or removed: threads do so one after another, and a process forks in between."""
os.register_at_fork(
    before=changing.acquire, after_in_parent=changing.release, after_in_child=changing.release
)


class Installation(Shown):
    """The hooks of a plan on a model, installed on entry and removed on exit, however the block ends.

    If it was entered and is dropped without being left, the hooks are removed too, with a ResourceWarning.

    sites:    one entry for each hook and module or parameter
    captures: hook name -> module path -> live list, one entry for each firing
    records:  what print, stats and check emitted, in order: flat dicts
    fired:    (hook name, module path) -> how often
    batch_of_calls: module whose call began a forward -> which dimension of its arguments is the batch; None: not known

    sink:       where captures and records go; in memory by default
    effects:    count how many elements the edits change
    scaler:     of mixed precision, so that hooks see unscaled gradients
    standalone: used in the user's own loop, without hookrun's tasks: the step follows the optimizer, and leaving the
                block warns about hooks that did nothing
    strict:     leaving the block raises HookrunError instead of warning
    restored:   the identities of the hooks that had changed the model when its present state was saved; they must
                not change it a second time
    reduced:    runs the hooks on parameter gradients after they were summed over several ranks; None: torch runs them
    replace_op: called for each site; what it returns runs in place of what the hook does there
    locate:     finds out which dimensions are the batch, at the first call of each module that begins a forward; only
                if a hook needs that and the plan does not say it
    """

    _stacklevel = 2  # frames from where a warning is raised to the `with` statement
    _is_inside = False
    sites: list[HookSite]

    def __init__(
        self,
        plan: ResolvedPlan,
        model: nn.Module,
        *,
        sink: Sink | None = None,
        effects: bool = False,
        scaler: GradScaler | None = None,
        standalone: bool = False,
        strict: bool = False,
        restored: Collection[str] = (),
        reduced: ReducedGradients | None = None,
        replace_op: ReplaceOp | None = None,
        locate: Locate | None = None,
    ) -> None:
        self.plan = plan
        self._standalone = standalone
        self._strict = strict
        self._model_ran = False
        self.clock = Clock(model, scaler, counting=effects)
        self.sink = sink if sink is not None else Memory()
        self._model = model
        self._spans: Mapping[str, Tensor] = {}
        self._wiring = Wiring(plan, model, self.clock, self.sink, restored, reduced, replace_op)
        self.sites = self._wiring.sites
        self._locate = locate
        self.batch_of_calls = WeakKeyDictionary[nn.Module, int | None]()
        if locate is not None and any(
            _needs_batch(hook, stored=self.sink.stores_rows) for hook in plan.hooks
        ):
            self.clock.calls.begins.append(partial(note_call, WeakMethod(self._locate_batch)))

    def __enter__(self) -> Installation:
        if self.sites:
            raise HookrunError(
                "these hooks were installed already: call plan.install(model) for a new installation"
            )
        with changing, collector_paused():
            try:
                self._wiring.install()
                self.clock.ending.append(self.sink.raise_failed)
                if self._standalone:
                    self._wiring.closing.callback(follow(after=self.clock.stepped))
                    self._first_call = self._wiring.listen(
                        self._model,
                        partial(note_call, WeakMethod(self._called)),
                    )
            except BaseException:
                self._wiring.remove()
                raise
        self._is_inside = True
        return self

    def _title(self) -> str:
        state = "not installed"
        if self.sites:
            state = f"{counted(len(self.sites), 'site')}, {'installed' if self._is_inside else 'removed'}"
        return f"hooks on {self.plan.model}, plan {self.plan.hash[:12]}: {state}"

    def _view(self) -> View:
        rows: list[list[str | int | None]] = []
        for site in self.sites[:MOST_ROWS]:
            place = [site.hook_name, site.path or "(root)", site.hook_type.name, site.spec.action.action_name]
            rows.append([*place, site.firings, site.why_idle])
        heads = ("hook", "module", "hook type", "action", "fired", "")
        return View(self._title(), heads, rows, len(self.sites))

    def _called(self, *call: object) -> None:
        """Note that the model is called."""
        self._model_ran = True
        self._first_call.remove()  # later calls cost nothing

    def _locate_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find out, from a call that begins a forward, what dimension is the batch, once for each such module."""
        with changing:  # a call in another thread waits until it is known
            if self._locate is None or module in self.batch_of_calls:
                return
            self.batch_of_calls[module] = None
            entry = next((path for path, each in self._model.named_modules() if each is module), None)
            if entry is not None:  # else it is a replica
                self.batch_of_calls[module] = self._locate(self, module, entry, (args, kwargs))

    def _remove(self) -> None:
        with changing:
            self._wiring.remove()
        self._is_inside = False

    def __del__(self) -> None:
        if self._is_inside and not sys.is_finalizing():
            error = HookrunError("the hooks were dropped without being left: use a `with` block")
            self.__exit__(HookrunError, error, None)
            warnings.warn(str(error), ResourceWarning, source=self, stacklevel=2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with nullcontext() if kind is None else suppress(HookrunError):
                self.clock.end_step()  # after an exception too: what it records may explain that
        finally:
            self._remove()
        if not self._standalone or kind is not None:
            return
        fired = any(site.firings for site in self.sites if site.hook_type.phase != "installation")
        if not (self._model_ran or fired):
            return  # neither the model nor a hooked part of it has run
        lines = describe_inactive(self.unexplained)
        if lines and self._strict:
            raise HookrunError("strict: hooks matched and did nothing\n" + "\n".join(lines))
        for line in [*lines, *self._guessed()]:
            warnings.warn(line, HookrunWarning, stacklevel=self._stacklevel)

    def _guessed(self) -> Iterator[str]:
        """A line for each hook that has treated the rows of the first dimension as samples, and nothing shows this."""
        for hook in self.plan.hooks:
            if not _needs_batch(hook, stored=False):
                continue
            sites = [
                site for site in self.sites if site.hook_name == hook.spec.name and site.firings > site.idle
            ]
            if unknown := [site.path or "(root)" for site in sites if not site.batch.is_known]:
                yield (
                    f"{hook.spec.name} has taken the first dimension for the batch on {listed(unknown, _SHOWN)}: no "
                    f"trial run shows which one it is; say it by batch_dim in hooks.{hook.spec.name}"
                )

    @property
    def captures(self) -> Mapping[str, Mapping[str, list[Any]]]:
        """Hook name -> module path -> captured values; empty where the sink writes them to disk."""
        kept = self.sink.captures if isinstance(self.sink, Memory) else {}
        return {
            hook.spec.name: Lookup(
                "module", f"the captures of {hook.spec.name!r}", kept.get(hook.spec.name, {}), hook.aliases
            )
            for hook in self.plan.hooks
            if hook.spec.action.captures
        }

    @property
    def folds(self) -> Mapping[str, Mapping[str, Folded]]:
        """Hook name -> module path -> what `fold` has accumulated so far, on this rank."""
        found: dict[str, Mapping[str, Folded]] = {}
        for hook in self.plan.hooks:
            if hook.spec.action.folds:
                name = hook.spec.name
                results = {
                    site.path: site.fold.result()
                    for site in self.sites
                    if site.hook_name == name and site.fold
                }
                seen = {path: result for path, result in results.items() if result is not None}
                found[name] = Lookup("module", f"the folds of {name!r}", seen, hook.aliases)
        return Lookup("hook", "the folds", found)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of print, stats, check and flip_bits, in order; empty where the sink writes them to disk."""
        return self.sink.records if isinstance(self.sink, Memory) else []

    @property
    def fired(self) -> Counts:
        """(hook name, module path) -> how often the hook fired; any name of a shared module can be used."""
        return Counts(self.plan, {(site.hook_name, site.path): site.firings for site in self.sites})

    @property
    def effects(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(hook name, module path) -> (changed elements, all elements) of its edits; counted with `effects=True`."""
        return {
            (site.hook_name, site.path): (int(site.changed), site.total) for site in self.sites if site.total
        }

    @property
    def inactive(self) -> list[tuple[str, str, str]]:
        """(hook, module path, why) of hooks that never fired there, found no tensor, or repeated a part of a list."""
        causes = self._causes
        acted = {site.hook_name for site in self.sites if site.firings > site.idle}
        sites: list[HookSite] = []
        for site in self.sites:
            if not (site.spec.action.finds and site.hook_name in acted):  # it is not on all of its modules
                sites.append(site)
        never = [
            (site.hook_name, site.path, f"never fired{causes.get((site.hook_name, site.path), '')}")
            for site in sites
            if not site.firings
        ]
        idle = [(site.hook_name, site.path, why) for site in sites if (why := site.why_idle)]
        return never + idle

    @property
    def unexplained(self) -> list[tuple[str, str, str]]:
        """`inactive` without the hooks that could not fire, because another one skips or stops what they wait for.

        Leaving the block reports them.
        """
        causes = self._causes
        return [each for each in self.inactive if each[:2] not in causes]

    @property
    def _causes(self) -> dict[tuple[str, str], str]:
        """(hook, module path) of a hook that could not fire -> the rest of the sentence that says so."""
        acted = [site for site in self.sites if site.firings and not site.let_through]
        stops = [f"{site.hook_name} stops the forward" for site in acted if site.spec.action.does == "stop"]
        skips = {(site.hook_name, site.path) for site in acted if site.spec.action.does == "skip"}
        names = {
            (hook.spec.name, match.path): match.names for hook in self.plan.hooks for match in hook.matches
        }
        skipped = [name for skip in skips for name in names[skip]]
        cause = ""
        if stops:
            cause = stops[0]
        elif skips:
            cause = f"{min(skips)[0]} skips the module"
        silent = [(site.hook_name, site.path) for site in self.sites if not site.firings]
        return {
            place: f": {cause}"
            for place in silent
            if stops or lies_in(names[place], skipped) or set(names[place]) <= set(skipped)
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the hooks between two steps, as plain values: by hook name and module path.

        It has the clock, how often each hook fired and acted, the positions of the hooks' random generators, what is
        left of the `max_bytes` budgets, and whether a check asks for the end of the run. Pending records are read
        first. Not in it: parameters that hooks added, which are in the model's state, and captures and records, which
        the sink keeps (in the run's files, or in memory with this object).
        """
        self.sink.settle()  # rules over steps keep what they have judged
        sites: dict[str, dict[str, Any]] = {}
        for site in self.sites:
            sites.setdefault(site.hook_name, {})[site.path] = site.state_dict()
        return {
            "plan": self.plan.hash,
            "clock": self.clock.state_dict(),
            "sites": sites,
            "sink": self.sink.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from the result of `state_dict`. The hooks must be installed and must not have run yet.

        strict: raise HookrunError for the state of another plan; False: load the hooks and modules that both have
        """
        if strict:
            require_same_plan(state, self.plan.hash, ((site.hook_name, site.path) for site in self.sites))
        self.clock.load_state_dict(state["clock"])
        for site in self.sites:
            of_site = state["sites"].get(site.hook_name, {}).get(site.path)
            if of_site is not None:
                site.load_state_dict(of_site)
        self.sink.load_state_dict(state["sink"])

    @property
    def mode(self) -> str:
        """``train`` or ``eval``: the mode of the model."""
        return self.clock.mode

    def compile(self, **options: Any) -> Callable[..., Any]:
        """Compile the hooked model with `torch.compile`; returns the compiled function. `options`: of torch.compile.

        Plain ``torch.compile(model)`` can silently reuse a graph without these hooks if another model of the same
        class was compiled before, because torch's guards do not look at hooks. This method therefore discards all
        compiled graphs (`torch.compiler.reset`) and compiles graphs for this installation alone. Direct calls of the
        model, without the returned function, use torch's ordinary hook dispatch from then on.

        Gradients of parameters are seen after the whole backward pass, in an order that says nothing about where they
        were computed: a check of them names no `last_good`.

        Raises CompileError that lists every hook that cannot be part of a compiled graph.
        """
        problems = uncompilable(self.plan)
        if self._wiring.observers.any:
            what = "uses CUDA graphs, which cannot contain what stats and check pass to Python"
            mode = options.get("mode")
            if mode in _CUDA_GRAPHS:
                hint = "use mode='max-autotune-no-cudagraphs', or leave `mode` out"
                problems.append(Problem("mode", f"{mode} {what}", hint))
            if options.get("backend") == _CUDA_GRAPHS_BACKEND:
                hint = "use backend='inductor', or leave `backend` out"
                problems.append(Problem("backend", f"{_CUDA_GRAPHS_BACKEND} {what}", hint))
            if (options.get("options") or {}).get(_CUDA_GRAPHS_OPTION):
                problems.append(Problem("options", f"{_CUDA_GRAPHS_OPTION} {what}", "leave it out"))
        refuse(problems, CompileError)
        for site in self.sites:
            if site.hook_type.on == "parameter" and site.hook_type.phase == "backward":
                self.sink.last_good.without_order.add(site.hook_name)
        torch.compiler.reset()
        hooked_model = self._model  # the filter of guards in `graph_backend` knows it by this name
        call_through_torch(hooked_model.modules())

        def hooked(*args: Any, **kwargs: Any) -> Any:
            return hooked_model(*args, **kwargs)

        # torch stores its graphs by code object: each installation needs its own
        own = FunctionType(hooked.__code__.replace(), globals(), hooked.__name__, None, hooked.__closure__)
        if self._wiring.observers.any:
            options = observing(self._wiring.observers, options)
        compiled = torch.compile(own, **options)
        gradients = self._wiring.wrapped
        if gradients is None:
            return compiled

        def followed(*args: Any, **kwargs: Any) -> Any:
            # outside of the graph, in which no call of the model is followed
            gradients.forward_begins()
            output = compiled(*args, **kwargs)
            gradients.forward_ended(hooked_model, args, output)
            return output

        return followed

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Firings inside the block are not counted."""
        with ExitStack() as counts:
            for site in self.sites:
                counts.enter_context(site.uncounted())
            yield

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Observers are counted inside the block, and record nothing."""
        before = self.sink.muted
        self.sink.muted = True
        try:
            yield
        finally:
            self.sink.muted = before

    def paused(self) -> AbstractContextManager[None]:
        """No hook runs in forward passes inside the block; changes by `apply` hooks stay in the model."""
        return self._wiring.paused()

    def follow_parameters(self) -> None:
        """Move hooks to the shards that fully_shard has put in the place of the parameters."""
        self._wiring.hooked.follow()

    def step(self) -> None:
        """End the step that `when` sees: call it after `optimizer.step()`, or after each batch in evaluation.

        As long as it has not been called, the steps of the first optimizer that steps the model are counted instead.
        """
        self.clock.advance()

    def epoch(self) -> None:
        """End the epoch that `when` sees."""
        self.clock.epoch += 1

    @property
    def accumulating(self) -> bool:
        """True while more micro-batches follow before the step; `post_accumulate_grad` fires on the last one only."""
        return self.clock.accumulating

    @accumulating.setter
    def accumulating(self, more: bool) -> None:
        self.clock.accumulating = more

    @property
    def samples(self) -> Tensor | None:
        """The sample numbers [B] of the current batch, for values that differ between samples; None: not known.

        Setting anything but whole numbers from 0 in one dimension raises HookrunError.
        """
        return self.clock.samples

    @samples.setter
    def samples(self, numbers: Tensor | Sequence[int] | None) -> None:
        if numbers is None:
            self.clock.samples = None
            return
        samples = whole_numbers(numbers)
        if samples is None or samples.dim() != 1 or bool((samples < 0).any()):
            found = (
                f"{list(numbers.shape)} of {numbers.dtype}"
                if isinstance(numbers, Tensor)
                else repr(numbers)[:80]
            )
            raise HookrunError(
                f"samples: found {found}, expected [B] whole numbers from 0, one for each sample of the batch"
            )
        self.clock.samples = samples

    @property
    def labels(self) -> Tensor | None:
        """The labels [B] of the samples of the current batch, for `fold` with `by: label`; None: not known.

        Setting anything but whole numbers in one dimension raises HookrunError.
        """
        return self.clock.labels

    @labels.setter
    def labels(self, labels: Tensor | Sequence[int] | None) -> None:
        numbers = None if labels is None else whole_numbers(labels)
        if labels is not None and (numbers is None or numbers.dim() != 1):
            raise HookrunError(
                f"labels: found {labels!r:.80}, expected [B] whole numbers, one for each sample"
            )
        self.clock.labels = numbers

    def tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Set the tokens of the model's next call, for hooks with `tokens`; call it before each batch.

        input_ids:      [B, T] integers
        attention_mask: [B, T], 0 for padding; by default no token is padding. [B, S] with S > T if a cache holds the
                        S - T tokens before them

        It is not needed for transformers models and others whose forward has an argument named `input_ids`. Later
        passes of a generation continue these sequences, with a cache or by computing all tokens again.

        Raises HookrunError for tensors of other shapes or dtypes.
        """
        shape = list(input_ids.shape)
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise HookrunError(f"tokens: found input_ids of shape {shape}, expected integers [B, T]")
        if attention_mask is not None and (
            attention_mask.dim() != 2
            or attention_mask.shape[0] != shape[0]
            or attention_mask.shape[1] < shape[1]
        ):
            raise HookrunError(
                f"tokens: found an attention_mask of shape {list(attention_mask.shape)} with input_ids of shape {shape}"
            )
        if self.clock.passes is not None:
            self.clock.passes.set_by_hand(CallTokens.of(input_ids, attention_mask))

    @property
    def spans(self) -> Mapping[str, Tensor]:
        """Name -> [B, 2] int64: for each sample of the current batch the start and the end (excluded) of a span.

        Both count from the sample's first real token; a sample without the span has [-1, -1]. Set it before the
        batch, for `tokens: {span: NAME}`.
        """
        return self._spans

    @spans.setter
    def spans(self, spans: Mapping[str, Any] | None) -> None:
        found: dict[str, Tensor] = {}
        for name, given in (spans or {}).items():
            bounds = torch.as_tensor(given, dtype=torch.int64, device="cpu")
            if bounds.dim() != 2 or bounds.shape[1] != 2:
                raise HookrunError(f"spans: {name}: found the shape {list(bounds.shape)}, expected [B, 2]")
            found[name] = bounds
        self._spans = found
        if self.clock.passes is not None:
            self.clock.passes.spans = found

    @property
    def loss(self) -> Tensor | None:
        """The loss of the step, for a `check` with `of: loss`: the mean of what was set in it; None: nothing was.

        In your own loop set it before the step ends, which is at `optimizer.step()` or `step()`. hookrun's tasks do so.
        """
        return self.clock.loss

    @loss.setter
    def loss(self, loss: Tensor | float) -> None:
        number = torch.as_tensor(loss).detach()
        if number.numel() != 1:
            raise HookrunError(f"loss: found a tensor of shape {list(number.shape)}, expected one number")
        self.clock.losses.append(number.reshape(1).double())

    @property
    def population(self) -> int | None:
        """How many samples there are to choose from, for `capture` with `keep: {reservoir: k}`; None: not known."""
        return self.clock.population

    @population.setter
    def population(self, count: int | None) -> None:
        self.clock.population = count

    @property
    def stopped(self) -> str | None:
        """Why a check with policy `stop` asks for the end of the run, or None. Reads the pending records first."""
        self.sink.settle()
        return self.sink.stop

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that these hooks added, with their names in the model."""
        for owner, name in self.plan.added():
            module = self._model.get_submodule(owner)
            if was_added(module, name) and name in module._parameters:
                yield f"{owner}.{name}" if owner else name, module.get_parameter(name)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that these hooks added, for an optimizer that was created before the hooks were installed."""
        return list(dict.fromkeys(parameter for _, parameter in self.named_parameters()))

    def uninstall_parameters(self) -> None:
        """Delete the parameters and buffers that these hooks added. Without it they stay: trained and saved."""
        for owner, name in self.plan.added():
            module = self._model.get_submodule(owner)
            if was_added(module, name):
                remove_parameter(module, name)


Locate = Callable[[Installation, nn.Module, str, tuple[Any, Any]], int | None]
"""(installation, the module that is called, its path, its arguments); see `hookrun.engine.prove.trial.locate_batch`."""


def _needs_batch(hook: PlannedHook, *, stored: bool) -> bool:
    """Whether the hook works by sample, and nothing says yet which dimension is the batch. stored: captures do, too."""
    spec = hook.spec
    by_sample = spec.works_by_sample or spec.action.by_row or (stored and spec.action.captures)
    known = all(hook.batch_of(match.path).is_known for match in hook.matches)
    return spec.hook_type.batch and by_sample and not known


def note_call(method: WeakMethod[Callable[..., None]], *call: object) -> None:
    """Give a call to a method of an installation, which the model must not keep alive."""
    if (note := method()) is not None:
        note(*call)


# ---- how often each hook fired, and which hooks did nothing ------------------------------------------------------


def describe_inactive(inactive: Iterable[tuple[str, str, str]], shown: int = 4) -> list[str]:
    """One line for each hook that did nothing on some modules: the reasons, each with its modules.

    inactive: (hook name, module path, reason)
    shown:    how many modules are named for each reason
    """
    by_hook: dict[str, dict[str, list[str]]] = {}
    for hook, path, why in inactive:
        by_hook.setdefault(hook, {}).setdefault(why, []).append(path or "(root)")
    return [
        f"{hook} " + "; ".join(f"{why} on {listed(paths, shown)}" for why, paths in reasons.items())
        for hook, reasons in by_hook.items()
    ]


class Counts(dict[tuple[str, str], int]):
    """(hook name, module path) -> count; a shared module can be looked up by any of its names."""

    def __init__(self, plan: ResolvedPlan, counts: Mapping[tuple[str, str], int]) -> None:
        super().__init__(counts)
        self._aliases = {hook.spec.name: hook.aliases for hook in plan.hooks}

    def __missing__(self, key: tuple[str, str]) -> int:
        hook, path = key
        first = hook, self._aliases.get(hook, {}).get(path, path)
        if first not in self:
            raise KeyError(key)
        return self[first]


# ---- the state of another installation ---------------------------------------------------------------------------

_SHOWN = 6


def require_same_plan(state: Mapping[str, Any], plan: str, sites: Iterable[tuple[str, str]]) -> None:
    """Raise HookrunError, with the differences, if the state was saved under another plan.

    state: from `Installation.state_dict`
    plan:  the hash of the installed plan
    sites: (hook name, module path) of all installed hooks
    """
    here = set(sites)
    there = {(hook, path) for hook, modules in state["sites"].items() for path in modules}
    if state["plan"] == plan and here == there:
        return
    differences = [
        f"{who} " + listed([f"{hook} on {path or '(root)'}" for hook, path in sorted(only)], _SHOWN)
        for who, only in (("only the state has", there - here), ("only the plan has", here - there))
        if only
    ] or [
        f"hooks of the same names have other settings: plan {state['plan'][:12]} in the state, {plan[:12]} here"
    ]
    raise HookrunError(
        "the state was saved under another plan:\n  "
        + "\n  ".join(differences)
        + "\n  use the hooks, the model and the seed with which it was saved"
    )
