"""Plan -> installed hooks: a context manager, and what the user reads from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookrun.actions.base import remove_parameter, was_added
from hookrun.errors import CompileError, HookrunError
from hookrun.lookup import Lookup
from hookrun.plan.graph_support import uncompilable
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.clock import Clock
from hookrun.runtime.records import Memory
from hookrun.runtime.site import PlacedHook, Sink
from hookrun.runtime.wiring import Wiring

if TYPE_CHECKING:
    from torch.amp import GradScaler


class Installation:
    """The hooks of a plan on a model, installed on entry and removed on exit, however the block ends.

    captures: hook name -> module path -> live list, one entry for each firing
    records:  what print, stats and check emitted, in order: flat dicts
    fired:    (hook name, module path) -> how often
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        model: nn.Module,
        *,
        sink: Sink | None = None,
        effects: bool = False,
        scaler: GradScaler | None = None,
    ) -> None:
        self.plan = plan
        self.clock = Clock(model, scaler, counting=effects)
        self.sink = sink if sink is not None else Memory()
        self._model = model
        self._wiring = Wiring(plan, model, self.clock, self.sink)

    def __enter__(self) -> Installation:
        if self._wiring.sites:
            raise HookrunError(
                "these hooks were installed already: call plan.install(model) for a new installation"
            )
        try:
            self._wiring.install()
        except BaseException:
            self._wiring.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wiring.remove()

    @property
    def sites(self) -> list[PlacedHook]:
        """One for each hook and module or parameter."""
        return self._wiring.sites

    @property
    def captures(self) -> Mapping[str, Mapping[str, list[Any]]]:
        """What `capture` kept, where it was kept in memory."""
        kept = self.sink.captures if isinstance(self.sink, Memory) else {}
        return {
            hook.spec.name: Lookup(
                "module", f"the captures of {hook.spec.name!r}", kept.get(hook.spec.name, {}), hook.aliases
            )
            for hook in self.plan.hooks
            if hook.spec.action.captures
        }

    @property
    def records(self) -> list[dict[str, Any]]:
        """What print, stats and check emitted, in order, where it was kept in memory."""
        return self.sink.records if isinstance(self.sink, Memory) else []

    @property
    def fired(self) -> Counts:
        """How often each hook fired on each module; a module is found under each of its names."""
        return Counts(self.plan, {(site.hook_name, site.path): self._fired(site) for site in self.sites})

    def _fired(self, site: PlacedHook) -> int:
        return site.fired + self._wiring.tracing.fired(site)

    @property
    def effects(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(hook name, module path) -> elements that edits changed, out of how many; counted with `effects=True`."""
        return {
            (site.hook_name, site.path): (int(site.changed), site.total) for site in self.sites if site.total
        }

    @property
    def inactive(self) -> list[tuple[str, str, str]]:
        """(hook, module path, why) of everything that never fired, or found nothing for its action."""
        never = [(site.hook_name, site.path, "never fired") for site in self.sites if not self._fired(site)]
        idle = [site for site in self.sites if site.fired and site.idle >= site.fired]
        return never + [
            (site.hook_name, site.path, "fired and found no tensor for its action") for site in idle
        ]

    @property
    def mode(self) -> str:
        """``train`` or ``eval``, as the model is."""
        return self.clock.mode

    def compile(self, **options: Any) -> Callable[..., Any]:
        """The hooked model as a function that `torch.compile` makes; `options` are those of torch.compile.

        Plain ``torch.compile(model)`` takes a graph without these hooks, without a word, where another model of the
        same class has been compiled before: torch does not look at hooks when it asks whether a graph fits. Here what
        was compiled so far is forgotten (`torch._dynamo.reset`), and the graphs are this installation's own.

        Raises CompileError with every hook that no graph can hold.
        """
        if problems := uncompilable(self.plan):
            raise CompileError(problems)
        torch._dynamo.reset()
        model = self._model

        def hooked(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        # torch keeps its graphs with the code object: each installation has one of its own
        own = FunctionType(hooked.__code__.replace(), globals(), hooked.__name__, None, hooked.__closure__)
        return torch.compile(own, **options)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What fires inside does not count."""
        counts = [(site, site.fired, site.idle, site.changed, site.total) for site in self.sites]
        with self._wiring.tracing.uncounted():
            try:
                yield
            finally:
                for site, fired, idle, changed, total in counts:
                    site.fired, site.idle, site.changed, site.total = fired, idle, changed, total

    def step(self) -> None:
        """The step that `when` sees is over: call it after `optimizer.step()`, or after each batch in evaluation."""
        self.clock.step += 1

    def epoch(self) -> None:
        """The epoch that `when` sees is over."""
        self.clock.epoch += 1

    @property
    def accumulating(self) -> bool:
        """Set it while more micro-batches follow before a step: `post_accumulate_grad` waits for the last."""
        return self.clock.accumulating

    @accumulating.setter
    def accumulating(self, more: bool) -> None:
        self.clock.accumulating = more

    @property
    def samples(self) -> Tensor | None:
        """The numbers [B] of the samples in the batch under way, for values that differ from sample to sample."""
        return self.clock.samples

    @samples.setter
    def samples(self, numbers: Tensor | Sequence[int] | None) -> None:
        self.clock.samples = (
            None if numbers is None else torch.as_tensor(numbers, dtype=torch.int64, device="cpu")
        )

    @property
    def population(self) -> int | None:
        """Out of how many samples their numbers are, for `capture` with `keep: {reservoir: k}`."""
        return self.clock.population

    @population.setter
    def population(self, count: int | None) -> None:
        self.clock.population = count

    @property
    def stopped(self) -> str | None:
        """Why a check with policy `stop` asks for the end of the run, or None. It reads what checks left pending."""
        self.sink.settle()
        return self.sink.stop

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that these hooks added, with their names in the model."""
        for owner, name in self.plan.added():
            module = self._model.get_submodule(owner)
            if was_added(module, name):
                yield f"{owner}.{name}" if owner else name, module.get_parameter(name)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that these hooks added, for an optimizer that was made before them."""
        return [parameter for _, parameter in self.named_parameters()]

    def uninstall_parameters(self) -> None:
        """Delete the parameters that these hooks added; until then they stay in the model, are saved and trained."""
        for owner, name in self.plan.added():
            module = self._model.get_submodule(owner)
            if was_added(module, name):
                remove_parameter(module, name)


class Counts(dict[tuple[str, str], int]):
    """(hook name, module path) -> count; a module is found under each of its names."""

    def __init__(self, plan: ResolvedPlan, counts: Mapping[tuple[str, str], int]) -> None:
        super().__init__(counts)
        self._aliases = {hook.spec.name: hook.aliases for hook in plan.hooks}

    def __missing__(self, key: tuple[str, str]) -> int:
        hook, path = key
        first = hook, self._aliases.get(hook, {}).get(path, path)
        if first not in self:
            raise KeyError(key)
        return self[first]
