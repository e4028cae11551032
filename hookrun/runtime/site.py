"""One hook at one module or parameter: what it counts, and what its action may ask of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor, nn

from hookrun import containers
from hookrun.actions.base import RECORD_KEYS, Keeper, add_parameter, was_added
from hookrun.actions.context import HookContext
from hookrun.actions.given import GivenFunction
from hookrun.actions.rows import TokenRows
from hookrun.actions.stats import Measured
from hookrun.actions.values import OutsideValue
from hookrun.errors import HookError
from hookrun.plan.plan import PlannedHook
from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.drawn import Fill, drawn
from hookrun.runtime.firing_state import FiringState, TokensNow
from hookrun.runtime.judging import judge
from hookrun.runtime.kept_samples import KeptSamples
from hookrun.runtime.outside_values import OutsideValues
from hookrun.runtime.parts import part_of
from hookrun.runtime.rng import Draws, derived_seed
from hookrun.runtime.state import HeldObjects
from hookrun.runtime.tokens.choice import Chosen
from hookrun.runtime.tokens.passes import Pass
from hookrun.snapshot import copied
from hookrun.tensor_copies import readable
from hookrun.trusted import Trusted

if TYPE_CHECKING:
    from hookrun.actions.keep import Keep


class Sink(Protocol):
    """Where records and captured values go. The store has one, memory has one, the shape check has one.

    wants_calls: it reads which call of a module within one forward a value is of
    has_values:  tensors hold real values, which may be read
    stop:        why a check with policy `stop` asks for the end of the run, or None
    """

    wants_calls: bool
    has_values: bool
    stop: str | None

    def keeper(self, site: PlacedHook) -> Keeper:
        """A function that stores a value that the site captured."""

    def emit(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Take a record; tensors in it are not read yet. `show`: print it at once."""

    def measure(self, start: tuple[Any, ...], data: Measured) -> bool:
        """Take a record that begins with these values of RECORD_KEYS, and has its statistics later; False: emit it."""

    def fail(self, site: PlacedHook, what: str) -> None:
        """A site cannot do what its hook asks for: raise, or take note of it."""

    def guard(self, site: PlacedHook, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site, or one that takes note of its failures."""

    def settle(self) -> None:
        """Read what is pending."""


class PlacedHook:
    """Implements `hookrun.actions.base.Site`; made anew at each installation.

    fired:   how often the hook fired here (its schedule let it through)
    within:  path of the tensor that the hook is attached to, where a gradient hook is attached to each of several
    at:      path of the tensor that the action is given, within that
    idle:    firings in which it found nothing to act on
    changed: elements that its edits changed, out of `total`, while the clock was counting
    of_call: the call that a gradient or a saved tensor belongs to; None: the call under way
    of_pass: the pass over the tokens that a gradient belongs to; None: the one under way
    chosen:  the positions that the firing under way is about, under `tokens`
    tokenizer: for the text of tokens; None: not known
    part:    the part of a tensor that the action acts on; None: all of it
    whole:   the tensor that the part under way is of, where `needs_whole`

    What belongs to one firing (`within`, `at`, `of_call`, `of_pass`, `args`, `whole`, `chosen`) is kept apart for each
    thread.
    """

    def __init__(
        self, hook: PlannedHook, path: str, module: nn.Module, clock: Clock, sink: Sink, seed: int
    ) -> None:
        self.spec = hook.spec
        self.hook_name = hook.spec.name
        self.hook_type = hook.spec.hook_type
        self.path = path
        self.module = module
        self.clock = clock
        self.sink = sink
        self.calls: Calls | None = None
        self.fired = 0
        self.idle = 0
        self._idle_at = 0
        self.changed: Tensor | int = 0
        self.total = 0
        own_seed = hook.spec.action.random_seed()
        seed = seed if own_seed is None else own_seed
        self.seed = derived_seed(seed, self.hook_name, path)
        self._hook_seed = derived_seed(seed, self.hook_name)
        self._values = {field: values[path] for field, values in hook.values.items() if path in values}
        action = hook.spec.action
        self.firing_state = FiringState()
        self._tokens = TokensNow(path, self.firing_state, clock)
        self.part = part_of(hook, path, self._tokens)
        self.needs_whole = any(
            isinstance(value, OutsideValue) and (value.at is not None or value.per_sample)
            for value in action.outside_values().values()
        )
        self._functions = hook.functions
        self._held = HeldObjects(self.where)
        self.tokenizer = hook.tokenizer
        self._draws = Draws(self.seed)
        self._outside = OutsideValues(
            hook, self.where, self.part, self.firing_state, clock, self._draws, sink.has_values
        )

    @property
    def within(self) -> str:
        """Path of the tensor that the hook is attached to."""
        return self.firing_state.within

    @within.setter
    def within(self, path: str) -> None:
        self.firing_state.within = path

    @property
    def at(self) -> str:
        """Path of the tensor that the action is given."""
        return self.firing_state.at

    @at.setter
    def at(self, path: str) -> None:
        self.firing_state.at = path

    @property
    def of_call(self) -> int | None:
        """The call that a gradient or a saved tensor belongs to."""
        return self.firing_state.of_call

    @of_call.setter
    def of_call(self, number: int | None) -> None:
        self.firing_state.of_call = number

    @property
    def of_pass(self) -> Pass | None:
        """The pass over the tokens that a gradient belongs to."""
        return self.firing_state.of_pass

    @of_pass.setter
    def of_pass(self, found: Pass | None) -> None:
        self.firing_state.of_pass = found

    @property
    def tokens_now(self) -> Pass | None:
        """The pass over the tokens that the firing under way belongs to; None: nothing says which."""
        return self._tokens.under_way

    @property
    def chosen_tokens(self) -> Chosen | None:
        """The positions that the firing under way is about, under `tokens`."""
        return self.firing_state.chosen

    @property
    def whole(self) -> Tensor | None:
        """The tensor that the part under way is of."""
        return self.firing_state.whole

    @whole.setter
    def whole(self, tensor: Tensor | None) -> None:
        self.firing_state.whole = tensor

    @cached_property
    def where(self) -> str:
        """For messages: ``hook 'clip_fc' (grad, clamp) on fc.weight``."""
        what = f"{self.hook_type}, {self.spec.action.action_name}"
        return f"hook {self.hook_name!r} ({what}) on {self.path or '(root)'}"

    @property
    def call(self) -> int:
        """The number of the module's call within the forward, from 0; a gradient belongs to the call that it is of."""
        of_call = self.firing_state.of_call
        if of_call is not None:
            return of_call
        return 0 if self.calls is None else self.calls.now.number

    def number_calls(self, calls: Calls | None) -> None:
        """Take the numbers of the module's calls from there; draws in the forward pass are then found again."""
        self.calls = self._tokens.calls = calls
        if self.hook_type.phase == "forward":
            self._draws.calls = calls

    def state_dict(self) -> dict[str, Any]:
        """What it counted, how far its draws are, and what objects of the user's own say of themselves."""
        return {
            "fired": self.fired,
            "idle": self.idle,
            "changed": int(self.changed),
            "total": self.total,
            "draws": self._draws.state_dict(),
            "calls": None if self.calls is None else self.calls.state_dict(),
            "held": self._held.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.fired, self.idle = state["fired"], state["idle"]
        self.changed, self.total = state["changed"], state["total"]
        self._draws.load_state_dict(state["draws"])
        if self.calls is not None and state["calls"] is not None:
            self.calls.load_state_dict(state["calls"])
        self._held.load_state_dict(state["held"])

    # ---- values ------------------------------------------------------------------------------------------------

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """The value of `field` in the dtype and on the device of the argument; its part, where it has `at: same`."""
        given = getattr(self.spec.action, field)
        return self._outside.constant(given, self._values.get(field))

    def function(self, field: str) -> Trusted | GivenFunction:
        """The user's own function that the field names."""
        return self._functions[field]

    def context(self) -> HookContext:
        """The firing under way."""
        clock, keys = self.clock, self.spec.keys
        return HookContext(
            self.hook_name,
            self.hook_type.name,
            self.path,
            self.module,
            clock.mode,
            clock.epoch,
            clock.step,
            self.call,
            self.within or str(keys.target or ""),
            self.generator,
        )

    def holds(self, own: Any) -> None:
        """The action keeps this object from firing to firing."""
        self._held.add(own)

    def trainable(self, field: str) -> Callable[[], nn.Parameter]:
        """Gives the added parameter, as it is in the module at that time; made on the first installation."""
        name = self.spec.action.adds(self.hook_name)
        if name is None:
            raise self._undeclared("adds a parameter", "its `adds` names none")
        present = partial(getattr, self.module, name)
        if was_added(self.module, name):
            return present
        # an activation has no parameters of its own
        nearby = chain(self.module.parameters(), self.clock.model.parameters())
        like = next((p for p in nearby if p.is_floating_point()), torch.empty(0))
        parameter = nn.Parameter(self.constant(field)(like).clone())
        add_parameter(self.module, name, parameter)
        return present

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the module call under way."""
        if not self.spec.action.reads_arguments:
            raise self._undeclared("reads the module's arguments", "declare `reads_arguments = True`")
        return self.firing_state.args

    @args.setter
    def args(self, args: tuple[Any, ...]) -> None:
        self.firing_state.args = args

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor and every None, with its path."""
        return containers.leaves(value)

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is not a container; in a capture also within caches."""
        rebuild = copied if self.spec.action.captures else containers.rebuild
        return rebuild(value, change)

    def traced(self, value: Any) -> bool:
        """Whether a tensor of the value only stands for others, since the model is being exported or traced."""
        found = (tensor for tensor in containers.tensors(value) if not tensor.is_meta)
        return self.sink.has_values and any(readable(tensor) is None for tensor in found)

    def generator(self, like: Tensor) -> Generator:
        """Seeded anew for each draw, so that a draw depends only on which one it is."""
        if not self.spec.action.draws:  # activation checkpointing would repeat the call with other numbers
            raise self._undeclared("draws random numbers", "declare `draws = True`")
        return self._draws.generator(like.device)

    def drawn(self, like: Tensor, fill: Fill) -> Tensor:
        """Random numbers in the form of `like`."""
        return drawn(like, fill, self.generator(like), self.clock.rows if self.hook_type.of_rows else None)

    def chance(self) -> float:
        """A number from 0 to 1 that decides whether this firing takes place, the same where it is repeated."""
        return self._draws.chance(self.spec.keys.when.seed)

    @property
    def draws(self) -> bool:
        """Whether what the hook does here may depend on which of its draws it is."""
        return self.spec.action.draws or self.spec.keys.when.probability < 1 or bool(self._values)

    @property
    def draws_place(self) -> tuple[dict[str, int], int]:
        """Which draw comes next here: an installation that is given it draws the same."""
        return self._draws.state_dict(), self.calls.total if self.calls is not None else 0

    @draws_place.setter
    def draws_place(self, place: tuple[dict[str, int], int]) -> None:
        draws, total = place
        self._draws.load_state_dict(draws)
        if self.calls is not None:
            self.calls.go_on_from(total)

    # ---- records and captures ----------------------------------------------------------------------------------

    def emit(self, data: Mapping[str, Any], path: str | None = None, *, show: bool = False) -> None:
        """Append a record."""
        clock, firing = self.clock, self.firing_state
        at = firing.within + (firing.at if path is None else path)
        when = clock.mode, clock.epoch, clock.step, self.call
        start = (self.hook_name, self.path, at, self.spec.action.action_name, *when)
        if type(data) is Measured and not show and self.sink.measure(start, data):
            return
        self.sink.emit({**dict(zip(RECORD_KEYS, start, strict=True)), **data}, show=show)

    def fail(self, what: str) -> None:
        """The hook cannot do what it asks for here: HookError, but for a shape check, which collects it."""
        self.sink.fail(self, what)

    def keep(self) -> Keeper:
        """Hand captured values to the sink."""
        if not self.spec.action.captures:
            raise self._undeclared("keeps values", "declare `captures = True`")
        keep = self.sink.keeper(self)
        return keep if self.spec.keys.tokens is None else self._with_tokens(keep)

    def _with_tokens(self, keep: Keeper) -> Keeper:
        """`keep`, told which sample and which token each row is of."""

        def keep_rows(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            chosen = self.firing_state.chosen
            if chosen is None:
                raise HookError(f"{self.where}: the value holds no tensor: name one with `target`")
            found = chosen.rows if rows is None else chosen.rows.at(rows)
            keep(value, found.samples, found)

        return keep_rows

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """The rows of the chosen samples; all of them where the samples are not real."""
        if not self.sink.has_values:
            return lambda shape: torch.arange(*shape[:1] or (1,), device="cpu")
        kept = KeptSamples(keep, self.clock, self._hook_seed, self.where)
        if self.spec.keys.tokens is None:
            return kept.rows

        def rows_of_tokens(shape: Sequence[int]) -> Tensor:
            chosen = self.firing_state.chosen
            of_rows = torch.arange(*shape[:1], device="cpu") if chosen is None else chosen.rows.samples
            return kept.is_kept()[of_rows].nonzero().squeeze(1)

        return rows_of_tokens

    def judge(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """`error` waits for the verdict and raises; the others leave it in a record that is read later."""
        judge(self, ok, message, policy, least, largest)

    def found_nothing(self) -> None:
        """The firing under way found nothing for its action."""
        if self._idle_at != self.fired:
            self._idle_at = self.fired
            self.idle += 1

    def _undeclared(self, does: str, hint: str) -> HookError:
        return HookError(f"{self.where}: the action {does}, which it does not declare: {hint}")
