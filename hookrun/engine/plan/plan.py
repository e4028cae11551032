"""The plan: which action runs on which module, in which order, and what of it a compiled graph cannot contain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hookrun.engine.actions.values import InlineFunction, PassValue, is_by_sample
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.plan.batch import BatchDims, Followers
from hookrun.engine.spec.hook import HookSpec
from hookrun.engine.trust.callables import Code
from hookrun.engine.trust.load import Trusted
from hookrun.errors import Problem, listed
from hookrun.run.experiment.run_values import Source, digest_of
from hookrun.store.records import UsedRunRecord

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
    own:         on `apply`: the parameters of the module that were matched; empty: the module itself was
    batch:       which dimensions of the tensors that the hook sees follow the batch; None: not known
    captured:    the same of the tensors that it captures, where these are not what it sees
    """

    path: str
    names: tuple[str, ...]
    type: str
    parameters: int
    shape: str | None = None
    called: bool | None = None
    bytes: float | None = None
    per_sample: bool = False
    own: tuple[str, ...] = ()
    batch: Followers | None = field(default=None, hash=False)
    captured: Followers | None = field(default=None, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {
            "path": self.path,
            "names": list(self.names),
            "class": self.type,
            "parameters": self.parameters,
            "shape": self.shape,
            "bytes": self.bytes,
            "per_sample": self.per_sample,
            **({"own": list(self.own)} if self.own else {}),
            **(
                {}
                if self.batch is None
                else {"batch": {path: list(dims) for path, dims in self.batch.items()}}
            ),
        }


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
class PlannedHook:
    """A hook with the modules or parameters that its selector matched, in the model's order.

    values:    field of the action -> path of a match -> its tensor, for values from a file or another run
    functions: field of the action -> the user's own function that it names
    heads:     path of a match -> how many heads its value has, if the hook has `heads`
    texts:     text in its `tokens` -> the ways in which it may be tokens
    tokenizer: the tokenizer that gives texts of tokens; None: without `tokens`, or not known
    own:       the parameters of the user's own module that each match gets: name -> shape
    buffers:   its buffers that each match gets: name -> shape
    """

    spec: HookSpec
    matches: tuple[Match, ...]
    values: Mapping[str, Mapping[str, Source]] = field(default_factory=dict, compare=False, repr=False)
    functions: Mapping[str, Trusted | InlineFunction] = field(default_factory=dict, compare=False, repr=False)
    heads: Mapping[str, HeadCount] = field(default_factory=dict, compare=False, repr=False)
    texts: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False, repr=False)
    tokenizer: Any = field(default=None, compare=False, repr=False)
    own: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def added(self) -> list[str]:
        """The names of the parameters and buffers that it adds to each module."""
        name = self.spec.action.adds(self.spec.name)
        return [*self.own, *self.buffers] if name is None else [name]

    def batch_of(self, path: str) -> BatchDims:
        """Which dimension of what the hook sees at a match is the batch, as its `batch_dim` or the trial run says."""
        keys = self.spec.keys
        match = self._match_at.get(path)
        # output_grad is attached to the target itself
        is_inside = keys.target is not None and self.spec.hook_type is not OUTPUT_GRAD
        seen = None if match is None else match.batch
        return BatchDims(seen, keys.batch_dim, str(keys.target) if is_inside else "")

    def captured_of(self, path: str) -> BatchDims:
        """The same of what the hook captures at a match."""
        match = self._match_at.get(path)
        captured = None if match is None else match.captured
        if captured is None and not self.spec.captures_part:
            return self.batch_of(path)
        return BatchDims(captured, self.spec.keys.batch_dim)

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
        digests = dict[str, str]()
        for key, values in self.values.items():
            # One value for all modules, or each module's own.
            different = [
                digest_of(value) for value in {id(value): value for value in values.values()}.values()
            ]
            several = hashlib.sha256(" ".join(different).encode()).hexdigest()
            digests[key] = different[0] if len(different) == 1 else several
        return digests

    @cached_property
    def graph_problems(self) -> tuple[Problem, ...]:
        """What of it a compiled graph cannot contain."""
        return tuple(_graph_problems(self))

    @cached_property
    def code(self) -> dict[str, dict[str, dict[str, str]]]:
        """Names and hashes of the user's own functions; empty without any."""
        codes = {key: function.code.to_dict() for key, function in self.functions.items()}
        return {"code": codes} if codes else {}


@dataclass(frozen=True)
class ResolvedPlan:
    """Every enabled hook in firing order, resolved against one model. `Plan` is one that can be installed.

    model:     the model's class
    unchecked: why shapes were not checked; None if they were, or if no example was given
    batch_unknown: why it is not known which dimensions are the batch, though shapes were checked; else None
    batch_as_sequence: modules of torch that have the steps of a sequence first, and get the samples there
    samples:   how many samples a run will see; None: not known
    code:      key path -> the user's own Python that the run uses outside its hooks
    runs:      the runs that values come from
    """

    model: str
    hooks: tuple[PlannedHook, ...]
    seed: int = 0
    unchecked: str | None = None
    batch_unknown: str | None = None
    batch_as_sequence: tuple[str, ...] = ()
    samples: int | None = None
    code: Mapping[str, Code] = field(default_factory=dict, hash=False)
    runs: tuple[UsedRunRecord, ...] = ()

    @property
    def batch_fits(self) -> bool:
        """Whether the larger batch of the trial run fitted the model."""
        return self.batch_unknown is None and not self.batch_as_sequence

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of what the plan does; it does not depend on whether shapes are known."""
        what = {
            "model": self.model,
            "seed": self.seed,
            "hooks": [
                {
                    "name": hook.spec.name,
                    **hook.spec.to_dict(),
                    "targets": [
                        [match.path, match.type, list(match.names), *match.own] for match in hook.matches
                    ],
                    "values": hook.digest,
                    **hook.code,
                }
                for hook in self.hooks
            ],
            **self._code(),
        }
        canonical = json.dumps(what, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {
            "hash": self.hash,
            "model": self.model,
            "seed": self.seed,
            "unchecked": self.unchecked,
            **({} if self.batch_unknown is None else {"batch_unknown": self.batch_unknown}),
            **({} if self.no_output is None else {"no_output": self.no_output}),
            "hooks": [
                {
                    "name": hook.spec.name,
                    **hook.spec.to_dict(),
                    "targets": [match.to_dict() for match in hook.matches],
                    **hook.code,
                }
                for hook in self.hooks
            ],
            "runs": [run.model_dump() for run in self.runs],
            **self._code(),
        }

    def _code(self) -> dict[str, Any]:
        return {"code": {where: code.to_dict() for where, code in self.code.items()}} if self.code else {}

    @property
    def no_output(self) -> str | None:
        """One sentence if a hook stops the forward, after which there is no output; else None."""
        stops = [
            f"{hook.spec.name} stops the forward after {match.path or '(root)'}"
            for hook in self.hooks
            if hook.spec.action.does == "stop"
            for match in hook.matches
        ]
        return (
            f"{listed(stops, SHOWN)}: there is no output, and there are no metrics of it" if stops else None
        )

    def applied(self) -> list[str]:
        """The identities of the hooks that change the model at installation, which checkpoints record."""
        return [hook.spec.identity for hook in self.hooks if hook.spec.hook_type.phase == "installation"]

    def added(self) -> Iterator[tuple[str, str]]:
        """Module path and name of every parameter and buffer that the plan adds."""
        for hook in self.hooks:
            yield from ((match.path, name) for match in hook.matches for name in hook.added)


def lies_in(names: Iterable[str], modules: Collection[str]) -> bool:
    """Whether each of these names of one module or parameter lies in one of the modules."""
    return all(any(not path or name.startswith(f"{path}.") for path in modules) for name in names)


def passed_on(hooks: Iterable[PlannedHook]) -> set[tuple[str, str | None]]:
    """(capture hook, module) of each value that a hook takes from another one in the same forward."""
    values = (value for hook in hooks for values in hook.values.values() for value in values.values())
    return {(value.hook, value.module) for value in values if isinstance(value, PassValue)}


def uncompilable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that cannot be part of a compiled graph, with the reason."""
    return [problem for hook in plan.hooks for problem in hook.graph_problems]


def unexportable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that an exported program, which only computes outputs, cannot contain."""
    problems = uncompilable(plan)
    for hook in plan.hooks:
        spec, kind, when = hook.spec, hook.spec.hook_type, hook.spec.keys.when
        of_training = kind.phase in ("backward", "step") and kind.refused_by_graph is None
        what = f"hook type {kind.name!r} belongs to training: an exported program computes outputs only"
        in_program = kind.of_rows or kind.in_graph
        of_keys = [
            ("", what, f"leave it out: ~{spec.where}", of_training),
            *(
                (f".when.{key}", f"an exported program has no {key}", f"leave `{key}` out", in_program)
                for key in ("step", "epoch")
                if getattr(when, key) is not None
            ),
            *(
                (f".{key}", "an exported program has no step", "give a number", kind.in_graph)
                for key in spec.action.ramps()
            ),
        ]
        problems += [Problem(spec.where + key, what, hint) for key, what, hint, holds in of_keys if holds]
    return problems


def _graph_problems(hook: PlannedHook) -> Iterator[Problem]:
    """A problem for each part of the hook that a graph cannot contain."""
    spec = hook.spec
    action, kind, when = spec.action, spec.hook_type, spec.keys.when
    plainly = f"run it without compiling, or leave it out: ~{spec.where}"

    def problem(key: str, why: str, hint: str = plainly) -> Problem:
        return Problem(spec.where + key, f"{action.action_name} on {kind.name!r} {why}", hint)

    if kind.refused_by_graph is not None:
        yield problem("", *kind.refused_by_graph)
    elif not kind.in_graph:
        return
    of_action = {
        "runs your own Python, which may not work inside a graph": action.own_functions(),
        "passes values to Python at each firing, which breaks the graph": action.observes,
        "ends the forward by an exception, which a graph cannot contain": action.does == "stop",
        "decides at each call whether the forward runs, but in a graph only once": (
            action.does == "skip" and not when.always
        ),
        "draws from a generator of its own, which a graph cannot contain": action.draws,
        "edits a parameter, which a graph cannot contain in torch 2.12: after the call the module has lost it": (
            kind.on == "reading" and _LOSES_PARAMETERS
        ),
    } | {
        f"edits {match.path}, which is parametrized or has no shape yet: a graph cannot contain that": True
        for match in hook.matches
        if kind.on == "reading" and match.shape is None
    }
    if kind.in_graph and (why := next((why for why, holds in of_action.items() if holds), None)) is not None:
        yield problem(".when" if action.does == "skip" else "", why)
    cannot, once = "which a graph cannot do", "is evaluated at each call, but in a graph only once"
    of_keys = [
        *(
            (key, f"takes rows of another run at each call, {cannot}", is_by_sample(value))
            for key, value in action.outside_values().items()
        ),
        *(
            (key, f"calls a function of yours at each call, {cannot}", isinstance(value, InlineFunction))
            for key, value in action.outside_values().items()
        ),
        ("tokens", f"are determined for each call, {cannot}", spec.keys.tokens is not None),
        ("when.rank", "is not read inside a graph", when.rank is not None),
        ("when.call", once, when.call is not None),
        ("when.data", once, when.data is not None),
        ("when.probability", once, when.probability < 1),
    ]
    yield from (problem(f".{key}", why) for key, why, holds in of_keys if holds)
