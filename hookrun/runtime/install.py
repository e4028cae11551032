"""Plan -> installed hooks: a context manager, and what the user reads from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.actions.base import remove_parameter, was_added
from hookrun.direct_calls import call_through_torch
from hookrun.errors import CompileError, HookrunError, HookrunWarning
from hookrun.lookup import Lookup
from hookrun.plan.graph_support import uncompilable
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.clock import Clock
from hookrun.runtime.compiled import tracing
from hookrun.runtime.counts import Counts, what_did_nothing
from hookrun.runtime.hooks.base import RegisteredHook
from hookrun.runtime.optimizers import follow, unfollow
from hookrun.runtime.records import Memory, RecordSink
from hookrun.runtime.reduced import ReducedGradients
from hookrun.runtime.site import PlacedHook, Sink
from hookrun.runtime.state import require_same_plan
from hookrun.runtime.tokens.calls import Told
from hookrun.runtime.wiring import Wiring

if TYPE_CHECKING:
    from torch.amp import GradScaler


class Installation:
    """The hooks of a plan on a model, installed on entry and removed on exit, however the block ends.

    captures: hook name -> module path -> live list, one entry for each firing
    records:  what print, stats and check emitted, in order: flat dicts
    fired:    (hook name, module path) -> how often

    standalone: in a loop of the user's own, where nothing else counts steps and tells what hooks did: the step follows
                the optimizer, and leaving the block warns of hooks that did nothing
    strict:     leaving the block raises HookrunError then
    restored:   the identities of the hooks that had changed the model when its present state was saved; what they
                would write again is put back
    reduced:    runs the hooks on gradients of parameters, where several ranks compute these; None: torch does
    """

    _told_at = 3  # frames from where a warning is raised to the `with` statement

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
    ) -> None:
        self.plan = plan
        self._standalone = standalone
        self._strict = strict
        self._ran = ModelRan()
        self.clock = Clock(model, scaler, counting=effects)
        self.sink = sink if sink is not None else Memory()
        self._model = model
        self._spans: Mapping[str, Tensor] = {}
        self._wiring = Wiring(plan, model, self.clock, self.sink, restored, reduced)

    def __enter__(self) -> Installation:
        if self._wiring.sites:
            raise HookrunError(
                "these hooks were installed already: call plan.install(model) for a new installation"
            )
        try:
            self._wiring.install()
            if self._standalone:
                self._ran.watch(self._model)
                follow(self.clock)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        if self._standalone and kind is None and self._model_ran():
            self._tell_inactive()

    def _remove(self) -> None:
        unfollow(self.clock)
        self._ran.forget()
        self._wiring.remove()

    def _model_ran(self) -> bool:
        """Whether the model, or a part of it that is hooked, has run in the block."""
        later = (site for site in self.sites if site.hook_type.phase != "installation")
        return self._ran.ran or any(self._fired(site) for site in later)

    def _tell_inactive(self) -> None:
        lines = what_did_nothing(self._told_inactive())
        if lines and self._strict:
            raise HookrunError("strict: hooks matched and did nothing\n" + "\n".join(lines))
        for line in lines:
            warnings.warn(line, HookrunWarning, stacklevel=self._told_at)

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

    def _told_inactive(self) -> list[tuple[str, str, str]]:
        """What leaving the block tells: everything that did nothing."""
        return self.inactive

    def state_dict(self) -> dict[str, Any]:
        """What the hooks hold between two steps, of plain values and by hook and module path.

        That is the clock, what fired and acted how often, how far the hooks' own draws are, what budgets have left,
        and what a check asks for. Records that wait to be read are read. Parameters that hooks added are the model's;
        what was captured and recorded is where the sink keeps it: of a run in its files, else with this object.
        """
        sites = dict[str, dict[str, Any]]()
        for site in self.sites:
            in_graphs = self._wiring.tracing.fired(site)
            sites.setdefault(site.hook_name, {})[site.path] = {**site.state_dict(), "in_graphs": in_graphs}
        return {
            "plan": self.plan.hash,
            "clock": self.clock.state_dict(),
            "sites": sites,
            "sink": self.sink.state_dict() if isinstance(self.sink, RecordSink) else {},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state that `state_dict` gave, of hooks that are installed and have not run yet.

        strict: HookrunError where the state is of another plan; False: what hooks and modules have in common is loaded
        """
        if strict:
            require_same_plan(state, self.plan.hash, ((site.hook_name, site.path) for site in self.sites))
        self.clock.load_state_dict(state["clock"])
        for site in self.sites:
            found = state["sites"].get(site.hook_name, {}).get(site.path)
            if found is not None:
                site.load_state_dict(found)
                self._wiring.tracing.recount(site, found["in_graphs"])
        if isinstance(self.sink, RecordSink):
            self.sink.load_state_dict(state["sink"])

    @property
    def mode(self) -> str:
        """``train`` or ``eval``, as the model is."""
        return self.clock.mode

    def compile(self, **options: Any) -> Callable[..., Any]:
        """The hooked model as a function that `torch.compile` makes; `options` are those of torch.compile.

        Plain ``torch.compile(model)`` takes a graph without these hooks, without a word, where another model of the
        same class has been compiled before: torch does not look at hooks when it asks whether a graph fits. Here what
        was compiled so far is forgotten (`torch._dynamo.reset`), and the graphs are this installation's own. The model
        itself, where it is called without the function, takes torch's general way to hooks from then on.

        Raises CompileError with every hook that no graph can hold.
        """
        if problems := uncompilable(self.plan):
            raise CompileError(problems)
        torch._dynamo.reset()
        model = self._model
        call_through_torch(model.modules())

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No hook runs in a forward inside; what `apply` hooks did to the model stays."""
        with self._wiring.paused():
            yield

    def follow_parameters(self) -> None:
        """Parameters were divided over the ranks (fully_shard): their hooks go with them."""
        self._wiring.follow_parameters()

    def step(self) -> None:
        """The step that `when` sees is over: call it after `optimizer.step()`, or after each batch in evaluation.

        Without it the step is that of the first optimizer that steps the model; the first call takes over.
        """
        self.clock.advance()

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

    def tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Which tokens the next call of the model computes, for hooks with `tokens`; before each batch.

        input_ids:      [B, T] whole numbers
        attention_mask: [B, T], not 0 where a token is real and not padding; all are unless given. [B, S] with S > T
                        where a cache holds the S - T tokens before them

        Calls of transformers models, and of others that are given `input_ids` by that name, tell it themselves. The
        passes that then generate go on with these sequences, with a cache or with all tokens once more.
        """
        sequences = self._wiring.sequences
        shape = list(input_ids.shape)
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise HookrunError(f"tokens: found input_ids of shape {shape}, expected whole numbers [B, T]")
        if attention_mask is not None and (
            attention_mask.dim() != 2
            or attention_mask.shape[0] != shape[0]
            or attention_mask.shape[1] < shape[1]
        ):
            found = list(attention_mask.shape)
            raise HookrunError(
                f"tokens: found an attention_mask of shape {found} with input_ids of shape {shape}"
            )
        if sequences is not None:
            sequences.tell(Told.of(input_ids, attention_mask))

    @property
    def spans(self) -> Mapping[str, Tensor]:
        """Name -> [B, 2] int64: a span of each sample in the batch under way, its first token and its end.

        Both count from the sample's first real token, and the end is not part of it; a sample without the span has
        [-1, -1]. Set it before the batch, for `tokens: {span: NAME}`.
        """
        return self._spans

    @spans.setter
    def spans(self, spans: Mapping[str, Any] | None) -> None:
        found = dict[str, Tensor]()
        for name, given in (spans or {}).items():
            bounds = torch.as_tensor(given, dtype=torch.int64, device="cpu")
            if bounds.dim() != 2 or bounds.shape[1] != 2:
                raise HookrunError(f"spans: {name}: found the shape {list(bounds.shape)}, expected [B, 2]")
            found[name] = bounds
        self._spans = found
        if self._wiring.sequences is not None:
            self._wiring.sequences.spans = found

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


class ModelRan(RegisteredHook):
    """Whether the model has been called since. It takes itself off at the first call, so that it costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = False
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Wait for the first call."""
        self._handle = model.register_forward_pre_hook(self.note)

    def note(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if not tracing():
            self.ran = True
            self.forget()

    def forget(self) -> None:
        """Wait no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
