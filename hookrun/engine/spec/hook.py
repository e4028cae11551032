"""One hook of the `hooks` mapping: which modules, which hook type, which action, on which schedule."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from hookrun.engine.actions import Action, actions
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.python import Python
from hookrun.engine.actions.values import OutsideValue, RunFaults, RunValue, is_drawn, parts_of
from hookrun.engine.hook_types import APPLY, HOOK_TYPES, OWN_KEYS, HookType
from hookrun.engine.html import Completed, Shown, View
from hookrun.engine.spec.heads import HeadsClause
from hookrun.engine.spec.selector import AnySelector, SchemaOnDemand
from hookrun.engine.spec.selector.base import shown
from hookrun.engine.spec.tokens import TokensClause
from hookrun.engine.spec.when import AnyExpect, Expect, When
from hookrun.engine.trust.load import ACTIONS as FUNCTIONS
from hookrun.engine.trust.load import short_names
from hookrun.engine.validation import Section, join, parse, unknown_key
from hookrun.engine.values.index import AnyIndex, AnyTarget
from hookrun.errors import Problem, counted, misnamed, shortened

MOST_PRIORITY = 10**9
MOST_TEXT = 48
"""The largest number of characters of a target or an index."""


class HookKeys(Section):
    """The keys that a hook may have beside `action` and the action's own parameters.

    parameters: `saved_tensors` hooks see parameters as well
    """

    select: AnySelector
    hook: Annotated[str, Field(strict=True), SchemaOnDemand(lambda: {"enum": list(HOOK_TYPES)})]
    target: AnyTarget | None = None
    index: AnyIndex | None = None
    tokens: TokensClause | None = None
    heads: HeadsClause | None = None
    batch_dim: Annotated[int, Field(strict=True, ge=0, le=63)] | None = None
    when: When = When.model_construct()
    expect: AnyExpect = Expect(">=1", least=1, most=None)
    enabled: bool = True
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    parameters: bool = False


@dataclass(frozen=True)
class HookSpec(Completed):
    """A validated hook; its action is the frozen params model."""

    name: str
    keys: HookKeys
    action: Action

    def __repr__(self) -> str:
        selected = shortened(str(self.keys.select))
        return f"{self.name}: {self.keys.hook} {self.action.action_name} on {selected}"

    @property
    def hook_type(self) -> HookType:
        """Its hook type."""
        return HOOK_TYPES[self.keys.hook]

    @property
    def where(self) -> str:
        """The key path."""
        return f"hooks.{self.name}"

    @property
    def takes_parameters(self) -> bool:
        """Whether the selector may also match parameters, which stand for their modules and the key `parameters`."""
        return self.hook_type is APPLY and "parameters" in type(self.action).model_fields

    def action_on(self, parameters: tuple[str, ...]) -> Action:
        """The action on a module of which the selector matches only these parameters; without any on the module."""
        return self.action.model_copy(update={"parameters": parameters}) if parameters else self.action

    @property
    def takes_part(self) -> bool:
        """Whether it acts on a part of each tensor only."""
        keys = self.keys
        return keys.index is not None or keys.tokens is not None or keys.heads is not None

    @cached_property
    def works_by_sample(self) -> bool:
        """Whether it treats each sample of a batch by itself, so that the batch dimension must be known."""
        keys = self.keys
        return keys.tokens is not None or bool(keys.when.of_samples) or self.action.works_by_sample

    @cached_property
    def fires_always(self) -> bool:
        """Whether `when` has no condition."""
        return self.keys.when.always

    @cached_property
    def chooses_samples(self) -> bool:
        """Whether `when` has a condition by sample."""
        return self.keys.when.value is not None or self.keys.when.data is not None

    @cached_property
    def draws_numbers(self) -> bool:
        """Whether it draws random numbers by itself."""
        return self.action.draws or self.keys.when.probability < 1

    @cached_property
    def runs_own_functions(self) -> bool:
        """Whether the action names functions of the user's own."""
        return bool(self.action.own_functions())

    @cached_property
    def byte_limit(self) -> int | None:
        """The most bytes that the hook may keep; None: there is no limit."""
        limit: int | None = self.action.value_of(Meaning.BYTE_LIMIT)
        return limit

    @cached_property
    def part_by_sample(self) -> bool:
        """Whether the part of a tensor that it acts on must have the batch first, or fail.

        Elements of any part may be drawn, whose samples are then those of the whole tensor.
        """
        return self.works_by_sample and ("flipped" not in self.action.uses or self.chooses_samples)

    @cached_property
    def needs_batch(self) -> bool:
        """Whether it gets tensors with the batch first."""
        return self.hook_type.batch and (self.part_by_sample or self.action.by_row)

    @cached_property
    def acts_on_part(self) -> bool:
        """Whether it gets anything but the whole tensor as it is."""
        return self.takes_part or self.needs_batch

    @cached_property
    def needs_whole(self) -> bool:
        """Whether the part of a value is taken that corresponds to the part of the whole tensor."""
        values = self.action.outside_values().values()
        return any(isinstance(value, OutsideValue) and value.at is not None for value in values)

    @property
    def captures_part(self) -> bool:
        """Whether what it captures is not the whole of what it sees."""
        return self.action.captures and (self.takes_part or self.action.reduces)

    @cached_property
    def draws_in_forward(self) -> bool:
        """Whether it draws at each forward call, so that activation checkpointing has to repeat the draws."""
        draws = self.action.draws or any(map(is_drawn, self.action.outside_values().values()))
        return (draws or self.keys.when.probability < 1) and self.hook_type.phase == "forward"

    def run_values(self) -> Iterator[tuple[str, RunValue | RunFaults]]:
        """(key path, value) of each value that it takes from another run."""
        for key, given in self.action.outside_values().items():
            for depth, value in enumerate(parts_of(given)):
                if isinstance(value, RunValue | RunFaults):
                    yield f"{self.where}.{key}" + ".minus" * depth, value

    @property
    def identity(self) -> str:
        """A hash by which checkpoints identify the hook: equal for equal name, modules, action and parameters."""
        plain = self.to_dict()
        content = [self.name, plain["select"], plain["action"], plain["params"]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The hook as plain data for JSON."""
        keys = self.keys
        plain: dict[str, Any] = {
            "select": str(keys.select),
            "hook": keys.hook,
            "action": self.action.action_name,
            "params": self.action.model_dump(mode="json"),
            "when": keys.when.model_dump(mode="json"),
            "expect": str(keys.expect),
            "priority": keys.priority,
        }
        if keys.batch_dim is not None:
            plain["batch_dim"] = keys.batch_dim
        if keys.target is not None:
            plain["target"] = str(keys.target)
        if keys.index is not None:
            plain["index"] = str(keys.index)
        if keys.tokens is not None:
            plain["tokens"] = keys.tokens.model_dump(mode="json", exclude_unset=True)
        if keys.heads is not None:
            plain["heads"] = keys.heads.model_dump(mode="json", exclude_unset=True)
        for key in sorted(OWN_KEYS & self.hook_type.takes):
            plain[key] = getattr(keys, key)
        return plain


@dataclass(frozen=True)
class BundleOrigin:
    """The bundle that hooks of a spec come from.

    path:   its folder, as it was named
    sha256: of its hooks, its tensors and what it says of its model
    model:  the class of the model that it was made for
    sites:  hook -> the modules or parameters where it was, each as text with its class and the shape there
    call:   a call of that model: `args` and `kwargs`, each tensor as its `dtype` and `shape`; None: not known
    """

    path: str
    sha256: str
    model: str
    sites: Mapping[str, str]
    call: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class Spec(Shown):
    """All hooks in the order of their declaration, and the seed from which their generators are derived.

    bundle: where some of the hooks come from; None: they were all written by the user
    """

    hooks: tuple[HookSpec, ...]
    seed: int = 0
    bundle: BundleOrigin | None = field(default=None, hash=False)

    def _view(self) -> View:
        rows: list[list[str]] = []
        for hook in self.hooks:
            keys = hook.keys
            doing = [keys.hook, hook.action.action_name, parameters(hook), str(keys.when)]
            rows.append([hook.name, str(keys.select), *doing])
        heads = ("hook", "select", "hook type", "action", "parameters", "when")
        return View(f"spec: {counted(len(rows), 'hook')}, seed {self.seed}", heads, rows)


def parameters(spec: HookSpec) -> str:
    """``target=[0] max=0.01``: what is given, without select, hook and action."""
    parts: list[str] = []
    for key in ("target", "tokens", "heads", "index", "batch_dim"):
        given = getattr(spec.keys, key)
        text = "" if given is None else str(given)
        if len(text) > MOST_TEXT:
            text = text[: MOST_TEXT - 1] + "…"
        if text:
            parts.append(f"{key}={text}")
    for key, value in spec.action.said(spec.hook_type).items():
        parts.append(f"{key}={argument(value)}")
    return " ".join(parts)


def argument(value: object) -> str:
    """A parameter of an action as the plan shows it: ``0.01``, ``[1, 2]``, ``tensor[3]``."""
    match value:
        case float():
            return f"{value:g}"
        case tuple() | list():
            return _cut("[" + ", ".join(map(argument, value)) + "]", 32)
        case dict():
            return _cut("{" + ", ".join(f"{key}: {argument(item)}" for key, item in value.items()) + "}", 60)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)}"
    return str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def parse_hooks(raw: Any) -> tuple[list[HookSpec], list[Problem]]:
    """The hooks of a mapping from name to hook, and every mistake in it."""
    if raw is None:
        return [], []
    if not isinstance(raw, Mapping):
        what = f"found a {type(raw).__name__}, expected a mapping from name to hook"
        return [], [
            Problem("hooks", what, "write each hook as `name: {select: ..., hook: ..., action: ...}`")
        ]
    hooks: list[HookSpec] = []
    problems: list[Problem] = []
    for name, body in raw.items():
        hook, wrong = _parse_hook(name, body, join("hooks", str(name)))
        problems += wrong
        if hook is not None:
            hooks.append(hook)
    return hooks, problems


def _parse_hook(name: Any, body: Any, where: str) -> tuple[HookSpec | None, list[Problem]]:
    """The hook, or None and every mistake in it."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w-]*", name):
        what = f"found the name {shown(name)}, expected a letter, then letters, digits, _ or -"
        return None, [Problem(where, what)]
    if not isinstance(body, Mapping):
        return None, [Problem(where, f"found {shown(body)}, expected a mapping with select, hook and action")]
    given = dict(body)
    if callable(given.get("action")):  # in Python the function itself
        if "function" in given:
            what = "the action is a function itself, and `function` is given as well"
            hint = "leave `function` out, or write action: python"
            return None, [Problem(join(where, "function"), what, hint)]
        given |= {"action": Python.action_name, "function": given["action"]}
    action_name = given.pop("action", None)
    action = actions().get(action_name) if isinstance(action_name, str) else None
    common = hook_keys(given.get("hook"))
    problems: list[Problem] = []
    if action is None:
        problems.append(_no_action(action_name, join(where, "action")))
    problems += _wrong_keys(given, action, where)
    keys, wrong_keys = parse(HookKeys, {key: given[key] for key in given if key in common}, where)
    problems += wrong_keys
    if action is None:
        return None, problems
    of_action = {key: given[key] for key in given if key in action.model_fields}
    params, wrong_params = parse(action, of_action, where)
    problems += wrong_params
    if problems or keys is None or params is None:
        return None, problems
    return HookSpec(name, keys, params), []


def _no_action(name: Any, where: str) -> Problem:
    """The problem of a name that no action has."""
    if name is None:
        return Problem(where, "is missing", f"it is one of: {', '.join(actions())}")
    what = f"found {shown(name)}, which is not an action"
    if name in short_names(FUNCTIONS):
        hint = f"it is a function of an installed package: action: python, function: {name}"
        return Problem(where, what, hint, found=name)
    return misnamed(where, what, str(name), actions())


def _wrong_keys(given: Mapping[Any, Any], action: type[Action] | None, where: str) -> Iterator[Problem]:
    """Problems of keys that no hook of this type with this action has, and of an unknown hook type."""
    hook_type = given.get("hook")
    keys = hook_keys(hook_type) | {"action"}
    for possible in [action] if action else actions().values():  # without an action, keys of any may be meant
        keys |= set(possible.model_fields)
    is_known = isinstance(hook_type, str) and hook_type in HOOK_TYPES
    allowed = keys if is_known else keys | OWN_KEYS
    for key in given:
        if key not in allowed:
            yield unknown_key(where, key, keys, section=given)
    if isinstance(hook_type, str) and not is_known:
        what = f"found {hook_type!r}, which is not a hook type"
        yield misnamed(join(where, "hook"), what, hook_type, HOOK_TYPES)


def hook_keys(hook_type: object) -> set[str]:
    """The keys of a hook of that type; keys of other hook types only may be parameters of the action."""
    kind = HOOK_TYPES.get(hook_type) if isinstance(hook_type, str) else None
    foreign = OWN_KEYS if kind is None else OWN_KEYS - kind.takes
    return set(HookKeys.model_fields) - foreign
