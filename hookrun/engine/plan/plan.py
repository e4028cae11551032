"""The plan: which action runs on which module, in which order, and what of it a compiled graph cannot contain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hookrun.engine.actions.base import BREAKS_GRAPH
from hookrun.engine.actions.values import InlineFunction, PassValue, is_by_sample
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.html import Completed
from hookrun.engine.plan.batch import BatchDims, Followers
from hookrun.engine.plan.outside import Source, UsedRun, digest_of
from hookrun.engine.plan.points import point_path
from hookrun.engine.spec.hook import BundleOrigin, HookSpec
from hookrun.engine.trust.callables import Code, code_of_class
from hookrun.engine.trust.load import Trusted
from hookrun.errors import Problem, counted, listed

SHOWN = 4
"""How many modules of a hook are named if there is other output beside them."""

_LOSES_PARAMETERS = torch.__version__ < "2.13"
"""Whether this torch removes a parameter from its module when a compiled call has ended that read an edited one."""


@dataclass(frozen=True)
class Match:
    """One module or parameter that a hook's selector matched.

    path:        its first name in ``named_modules`` or ``named_parameters``
    names:       all of its names; `path` is one of them
    type:        class of the module, or of the module that owns the parameter
    parameters:  number of elements of the parameter, or of all parameters of the module and its descendants
    shape:       shape of the module's output with the example; of its arguments for `forward_pre` and `backward`; or
                 of the parameter; None: not known
    called:      whether the example called it; None: not known
    bytes:       size of what one firing captures with the example; None: it captures nothing, or not known
    per_sample:  `bytes` is the size for one sample, in all calls of one forward
    matched_parameters: on `apply`: the parameters of the module that were matched; empty: the module itself was
    batch:       which dimensions of the tensors that the hook sees follow the batch; None: not known
    captured:    the same of the tensors that it captures, where these are not what it sees
    note:        what the action says of what it sees there; ``""``: nothing
    held:        the units of a fold, and the bytes that it holds of them, of each label; None: it is none, or not known
    """

    path: str
    names: tuple[str, ...]
    type: str
    parameters: int
    shape: str | None = None
    called: bool | None = None
    bytes: float | None = None
    per_sample: bool = False
    matched_parameters: tuple[str, ...] = ()
    batch: Followers | None = field(default=None, hash=False)
    captured: Followers | None = field(default=None, hash=False)
    note: str = ""
    held: tuple[int, int] | None = field(default=None, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        plain: dict[str, Any] = {
            "path": self.path,
            "names": list(self.names),
            "class": self.type,
            "parameters": self.parameters,
            "shape": self.shape,
            "bytes": self.bytes,
            "per_sample": self.per_sample,
        }
        if self.matched_parameters:
            plain["own"] = list(self.matched_parameters)
        if self.batch is not None:
            plain["batch"] = {path: list(dims) for path, dims in self.batch.items()}
        if self.note:
            plain["note"] = self.note
        return plain


@dataclass(frozen=True)
class HeadCount:
    """The heads of one module.

    counts:  number of query heads, and of key heads if there are fewer
    width:   size of one head; None: not known
    in_last: the last dimension of its value can be heads x width; False: only a dimension of its own can have heads
    """

    counts: tuple[int, ...]
    width: int | None = None
    in_last: bool = True


@dataclass(frozen=True)
class PlannedHook(Completed):
    """A hook with the modules or parameters that its selector matched, in the model's order.

    values:    field of the action -> path of a match -> its tensor, for values from a file or another run
    functions: field of the action -> the user's own function that it names
    heads:     path of a match -> how many heads its value has, if the hook has `heads`
    texts:     text in its `tokens` -> the ways in which it may be tokens
    tokenizer: the tokenizer that gives texts of tokens; None: without `tokens`, or not known
    new_parameters: the parameters of the user's own module that each match gets: name -> shape
    new_buffers:    its buffers that each match gets: name -> shape
    """

    spec: HookSpec
    matches: tuple[Match, ...]
    values: Mapping[str, Mapping[str, Source]] = field(default_factory=dict, compare=False, repr=False)
    functions: Mapping[str, Trusted | InlineFunction] = field(default_factory=dict, compare=False, repr=False)
    heads: Mapping[str, HeadCount] = field(default_factory=dict, compare=False, repr=False)
    texts: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False, repr=False)
    tokenizer: Any = field(default=None, compare=False, repr=False)
    new_parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    new_buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        noun = "parameter" if self.spec.hook_type.on_parameters else "module"
        return f"{self.spec!r}, {counted(len(self.matches), noun)}"

    @cached_property
    def added(self) -> list[str]:
        """The names of the parameters and buffers that it adds to each module."""
        name = self.spec.action.adds(self.spec.name)
        return [*self.new_parameters, *self.new_buffers] if name is None else [name]

    @cached_property
    def points(self) -> dict[str, str]:
        """Path of each point that its action adds -> the path of the module at which it is."""
        points: dict[str, str] = {}
        if self.spec.hook_type.on_parameters:
            return points
        for match in self.matches:
            for name in self.spec.action.points:
                points[point_path(match.path, self.spec.name, name)] = match.path
        return points

    def batch_of_points(self) -> dict[str, Followers]:
        """Path of each point -> its batch dimension: that of the action's tensor, and none if that is a part."""
        followers: dict[str, Followers] = {}
        for point, path in self.points.items():
            dims = self.batch_of(path)
            if dims.is_uniform:
                dim = None if self.spec.acts_on_part else dims.of("")
                followers[point] = {"": () if dim is None else (dim,)}
        return followers

    def batch_of(self, path: str) -> BatchDims:
        """Which dimension of what the hook sees at a match is the batch, as its `batch_dim` or the trial run says."""
        keys = self.spec.keys
        match = self._match_at.get(path)
        seen = None if match is None else match.batch
        inside = ""
        if (
            keys.target is not None and self.spec.hook_type is not OUTPUT_GRAD
        ):  # which is attached to the target
            inside = str(keys.target)
        return BatchDims(seen, keys.batch_dim, inside)

    def class_at(self, path: str) -> str | None:
        """The class of the module at a match, also after `fully_shard` has given it another one."""
        match = self._match_at.get(path)
        return None if match is None else match.type

    def captured_of(self, path: str) -> BatchDims:
        """The same of what the hook captures at a match."""
        match = self._match_at.get(path)
        captured = None if match is None else match.captured
        if captured is None and not self.spec.captures_part:
            return self.batch_of(path)
        return BatchDims(captured, self.spec.keys.batch_dim)

    @property
    def is_found(self) -> bool:
        """Whether a trial run has shown which tensors the action takes at each of its modules."""
        return all(match.note for match in self.matches)

    @cached_property
    def _match_at(self) -> dict[str, Match]:
        """Path -> the match with that path."""
        return {match.path: match for match in self.matches}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Every name of a match -> its path."""
        return {name: match.path for match in self.matches for name in match.names}

    @cached_property
    def digest(self) -> dict[str, str]:
        """Hashes of the tensors that came from files or other runs."""
        digests: dict[str, str] = {}
        for key, values in self.values.items():
            different = [digest_of(value) for value in each_once(values.values())]
            if len(different) == 1:
                digests[key] = different[0]
            else:
                digests[key] = _sha(" ".join(different))
        return digests

    @cached_property
    def graph_problems(self) -> tuple[Problem, ...]:
        """What of it a compiled graph cannot contain."""
        return tuple(_graph_problems(self))

    @cached_property
    def code(self) -> dict[str, dict[str, dict[str, str]]]:
        """Names and hashes of the user's own functions, and of an extension's action; empty without any."""
        codes = {key: function.code.to_dict() for key, function in self.functions.items()}
        action = code_of_class(type(self.spec.action))
        if action is not None:
            codes["action"] = action.to_dict()
        return {"code": codes} if codes else {}


def each_once(values: Iterable[Source]) -> list[Source]:
    """The different objects among the values of a hook's modules: one for all of them, or each module's own."""
    return list({id(value): value for value in values}.values())


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ResolvedPlan(Completed):
    """Every enabled hook in firing order, resolved against one model. `Plan` is one that can be installed.

    model:     the model's class
    unchecked: why shapes were not checked; None if they were, or if no example was given
    batch_unknown: why it is not known which dimensions are the batch, though shapes were checked; else None
    batch_as_sequence: modules of torch that have the steps of a sequence first, and get the samples there
    samples:   how many samples a run will see; None: not known
    code:      key path -> the user's own Python that the run uses outside its hooks
    runs:      the runs that values come from
    bundle:    the bundle that some of the hooks come from; None: of none
    """

    model: str
    hooks: tuple[PlannedHook, ...]
    seed: int = 0
    unchecked: str | None = None
    batch_unknown: str | None = None
    batch_as_sequence: tuple[str, ...] = ()
    samples: int | None = None
    code: Mapping[str, Code] = field(default_factory=dict, hash=False)
    runs: tuple[UsedRun, ...] = ()
    bundle: BundleOrigin | None = field(default=None, hash=False)

    @property
    def batch_fits(self) -> bool:
        """Whether the larger batch of the trial run fitted the model."""
        return self.batch_unknown is None and not self.batch_as_sequence

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of what the plan does; it does not depend on whether shapes are known."""
        hooks: list[dict[str, Any]] = []
        for hook in self.hooks:
            targets = [
                [match.path, match.type, list(match.names), *match.matched_parameters]
                for match in hook.matches
            ]
            hooks.append(_plain(hook, targets) | {"values": hook.digest})
        content: dict[str, Any] = {"model": self.model, "seed": self.seed, "hooks": hooks, **self._code()}
        if self.bundle is not None:
            content["bundle"] = self.bundle.sha256
        return _sha(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        plain: dict[str, Any] = {
            "hash": self.hash,
            "model": self.model,
            "seed": self.seed,
            "unchecked": self.unchecked,
        }
        if self.batch_unknown is not None:
            plain["batch_unknown"] = self.batch_unknown
        if self.no_output is not None:
            plain["no_output"] = self.no_output
        plain["hooks"] = [_plain(hook, [match.to_dict() for match in hook.matches]) for hook in self.hooks]
        plain["runs"] = [run.model_dump() for run in self.runs]
        if self.bundle is not None:
            about = {"path": self.bundle.path, "sha256": self.bundle.sha256, "model": self.bundle.model}
            plain["bundle"] = {**about, "hooks": list(self.bundle.sites)}
        return plain | self._code()

    def _code(self) -> dict[str, Any]:
        if not self.code:
            return {}
        return {"code": {where: code.to_dict() for where, code in self.code.items()}}

    @property
    def no_output(self) -> str | None:
        """One sentence if a hook stops the forward, after which there is no output; else None."""
        stops: list[str] = []
        for hook in self.hooks:
            if hook.spec.action.does == "stop":
                stops += [
                    f"{hook.spec.name} stops the forward after {match.path or '(root)'}"
                    for match in hook.matches
                ]
        if not stops:
            return None
        return f"{listed(stops, SHOWN)}: there is no output, and there are no metrics of it"

    def applied(self) -> list[str]:
        """The identities of the hooks that change the model at installation, which checkpoints record."""
        return [hook.spec.identity for hook in self.hooks if hook.spec.hook_type.phase == "installation"]

    def added(self) -> Iterator[tuple[str, str]]:
        """Module path and name of every parameter and buffer that the plan adds."""
        for hook in self.hooks:
            for match in hook.matches:
                yield from ((match.path, name) for name in hook.added)


def _plain(hook: PlannedHook, targets: list[Any]) -> dict[str, Any]:
    """The hook with its targets as plain data for JSON."""
    return {"name": hook.spec.name, **hook.spec.to_dict(), "targets": targets, **hook.code}


def lies_in(names: Iterable[str], modules: Collection[str]) -> bool:
    """Whether each of these names of one module or parameter lies in one of the modules."""
    inside = tuple(f"{path}." if path else "" for path in modules)
    return all(name.startswith(inside) for name in names)


def passed_on(hooks: Iterable[PlannedHook]) -> set[tuple[str, str | None]]:
    """(capture hook, module) of each value that a hook takes from another one in the same forward."""
    places = set[tuple[str, str | None]]()
    for hook in hooks:
        for values in hook.values.values():
            places |= {
                (value.hook, value.module) for value in values.values() if isinstance(value, PassValue)
            }
    return places


def uncompilable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that cannot be part of a compiled graph, with the reason."""
    return [problem for hook in plan.hooks for problem in hook.graph_problems]


def unexportable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that an exported program, which only computes outputs, cannot contain."""
    problems = uncompilable(plan)
    for hook in plan.hooks:
        problems += _program_problems(hook)
    return problems


def _program_problems(hook: PlannedHook) -> Iterator[Problem]:
    """A problem for each part of the hook that a graph can contain, and an exported program cannot."""
    spec = hook.spec
    kind = spec.hook_type
    if kind.in_graph and spec.action.observes and _why_not_in_a_graph(hook) is None:
        yield Problem(
            spec.where,
            f"{spec.action.action_name} passes values to Python, which an exported program does not have",
            f"leave it out: ~{spec.where}",
        )
    if kind.phase in ("backward", "step") and kind.refused_by_graph is None:
        yield Problem(
            spec.where,
            f"hook type {kind.name!r} belongs to training: an exported program computes outputs only",
            f"leave it out: ~{spec.where}",
        )
    if kind.sees_batch or kind.in_graph:
        for key in ("step", "epoch"):
            if getattr(spec.keys.when, key) is not None:
                what = f"an exported program has no {key}"
                yield Problem(f"{spec.where}.when.{key}", what, f"leave `{key}` out")
    if kind.in_graph:
        for key in spec.action.ramps():
            yield Problem(f"{spec.where}.{key}", "an exported program has no step", "give a number")


def _graph_problems(hook: PlannedHook) -> Iterator[Problem]:
    """A problem for each part of the hook that a graph cannot contain."""
    spec = hook.spec
    action = spec.action
    kind = spec.hook_type
    plainly = f"run it without compiling, or leave it out: ~{spec.where}"

    def problem(key: str, why: str, hint: str = plainly) -> Problem:
        return Problem(spec.where + key, f"{action.action_name} on {kind.name!r} {why}", hint)

    if kind.refused_by_graph is not None:
        yield problem("", *kind.refused_by_graph)
    elif not kind.in_graph:
        return
    why = _why_not_in_a_graph(hook) if kind.in_graph else None
    if why is not None:
        yield problem(".when" if action.does == "skip" else "", why)
    for key, value in action.outside_values().items():
        if is_by_sample(value):
            yield problem(f".{key}", "takes rows of another run at each call, which a graph cannot do")
        if isinstance(value, PassValue):
            what = f"passes what it sees to {spec.where}.{key} in each call, which a graph cannot do"
            yield Problem(f"hooks.{value.hook}", what, "run it without compiling, or leave out both hooks")
        if isinstance(value, InlineFunction):
            yield problem(f".{key}", "calls a function of yours at each call, which a graph cannot do")
    if spec.keys.tokens is not None:
        yield problem(".tokens", "are determined for each call, which a graph cannot do")
    when = spec.keys.when
    if when.rank is not None:
        yield problem(".when.rank", "is not read inside a graph")
    once = "is evaluated at each call, but in a graph only once"
    if when.call is not None:
        yield problem(".when.call", once)
    if when.data is not None:
        yield problem(".when.data", once)
    if when.probability < 1:
        yield problem(".when.probability", once)


def _why_not_in_a_graph(hook: PlannedHook) -> str | None:
    """The first reason why a graph cannot contain what the hook's action does, or None."""
    action = hook.spec.action
    reads = hook.spec.hook_type.on == "reading"
    if action.own_functions():
        return "runs your own Python, which may not work inside a graph"
    if action.observes:
        if hook.spec.chooses_samples:
            return "sees the samples that meet a condition, whose number a graph cannot know"
        if action.captures and hook.spec.hook_type.phase == "backward":
            return BREAKS_GRAPH
        return action.not_in_graph
    if action.does == "stop":
        return "ends the forward by an exception, which a graph cannot contain"
    if action.does == "skip" and not hook.spec.keys.when.always:
        return "decides at each call whether the forward runs, but in a graph only once"
    if action.draws:
        return "draws from a generator of its own, which a graph cannot contain"
    if reads and _LOSES_PARAMETERS:
        return "edits a parameter, which a graph cannot contain in torch 2.12: after the call the module has lost it"
    for match in hook.matches:
        if reads and match.shape is None:
            return (
                f"edits {match.path}, which is parametrized or has no shape yet: a graph cannot contain that"
            )
    return None
