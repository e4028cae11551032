"""Writes a bundle: the hooks of a run that edit, and a copy of every tensor that they need.

Values are read again from where the run had them, and must be the same: the hash of the plan tells. A selector becomes
the modules that it matched, so that a model with more of them is edited where the run's model was.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.init import Initialiser
from hookrun.engine.actions.values import FileValue, PassValue, RunFaults, RunValue, is_by_sample
from hookrun.engine.hook_types import APPLY
from hookrun.engine.keys import HOOKS_FROM
from hookrun.engine.plan.outside import PendingRun, Source
from hookrun.engine.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.engine.plan.resolve import captured_as
from hookrun.engine.runtime.rng import derived_seed
from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.hook import BundleOrigin
from hookrun.engine.spec.selector import parse_selector
from hookrun.engine.spec.selector.path import PathSelector
from hookrun.engine.trust.callables import Code
from hookrun.errors import (
    HookrunError,
    Mistakes,
    Problem,
    SpecError,
    first_lines,
    misnamed,
    refused_at,
    spec_error,
)
from hookrun.run.bundle_card import card
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.prepared import EXAMPLE_BATCH, as_call
from hookrun.run.experiment.run_values import RunReferences, read_faults, read_value
from hookrun.run.tasks import parse_experiment, task_of
from hookrun.run.tasks.under_hooks import TaskUnderHooks
from hookrun.store.bundles import CARD, HOOKS, TENSORS, VERSION, form_of, forms_of
from hookrun.store.captures.tensor_file import open_tensors, read_tensor, unstorable, write_tensors
from hookrun.store.config.interpolations import resolved
from hookrun.store.files import StoreError, new_file, os_errors, sync_folder, write_json
from hookrun.store.format import CHECKPOINTS, CONFIG, MODEL, MULTIRUN, STATUS
from hookrun.store.reader import Run, open_run
from hookrun.store.verify import verify

PICTURE = "picture.svg"
RUN, OUT = "RUN", "OUT"


@dataclass
class Bundling(Mistakes):
    """A bundle that is being made: what of the run's hooks goes into it, and why the rest does not.

    hooks:    name -> hook as in hooks.yaml
    tensors:  key -> tensor, as in tensors.safetensors
    left_out: hook -> why
    learned:  the checkpoint that learned parameters are from; ``""``: no hook has any
    """

    run: Run
    experiment: Experiment
    written: Mapping[str, Any]
    hooks: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    learned: str = ""

    @cached_property
    def runs(self) -> RunReferences:
        """The runs that values come from, where the run has found them. StoreError if one was run again since."""
        places = dict[str, str | None]()
        for record in self.run.plan["runs"]:
            places[record["run"]] = record["path"]
        task = task_of(self.experiment)
        split = task.only_split() if isinstance(task, TaskUnderHooks) else None
        return RunReferences(places, self.experiment.settings, split)

    @cached_property
    def matches(self) -> dict[str, tuple[Match, ...]]:
        """Hook -> the modules or parameters where it was."""
        matches = dict[str, tuple[Match, ...]]()
        for hook in self.run.plan["hooks"]:
            targets = list[Match]()
            for target in hook["targets"]:
                names = tuple(target["names"])
                parts = tuple(target.get("own", ()))
                targets.append(Match(target["path"], names, target["class"], 0, matched_parameters=parts))
            matches[hook["name"]] = tuple(targets)
        return matches

    def values_of(self, hook: HookSpec, **changes: Any) -> dict[str, Mapping[str, Source]]:
        """Field -> path of a match -> its value from a file or a run; changes: of each value, before it is read."""
        places = {match.path: captured_as(hook, match) for match in self.matches[hook.name]}
        values = dict[str, Mapping[str, Source]]()
        for key, value in hook.action.outside_values().items():
            with refused_at(f"{hook.where}.{key}"):
                if isinstance(value, RunFaults):
                    values[key] = read_faults(value, hook, places, self.runs)
                elif isinstance(value, FileValue | RunValue):
                    values[key] = read_value(value.model_copy(update=changes), places, self.runs)
        return values

    def require_same_plan(self) -> None:
        """Raise SpecError unless the hooks, with the values as they are now, are those that the run had."""
        plan = self.run.plan
        hooks = list[PlannedHook]()
        for hook in sorted(self.experiment.hooks.hooks, key=lambda hook: hook.keys.priority):
            if not hook.keys.enabled:
                continue
            if hook.name not in self.matches or hook.runs_own_functions:
                return  # other messages say why it cannot be handed on
            hooks.append(PlannedHook(hook, self.matches[hook.name], self.values_of(hook)))
        code = {
            where: Code(each["function"], each["sha256"], each["hashed"])
            for where, each in plan.get("code", {}).items()
        }
        origin = None
        if "bundle" in plan:
            origin = BundleOrigin("", plan["bundle"]["sha256"], "", {})
        again = ResolvedPlan(plan["model"], tuple(hooks), plan["seed"], code=code, bundle=origin)
        if again.hash != plan["hash"]:
            what = "files or runs that its hooks take values from have changed since"
            raise spec_error(RUN, f"{self.run.path}: {what}", "make the run again")

    def add_hook(self, hook: HookSpec) -> None:
        """Add a hook and its tensors, or a mistake for each part that cannot be handed on."""
        body = {"enabled": True} | copy.deepcopy(self.written[hook.name])
        if unfit := list(self._unfit(hook)):
            self.add(unfit)
            return
        matches = self.matches[hook.name]
        if not str(body["select"]).startswith("hook:"):
            texts = [text for match in matches for text in _selectors(match)]
            body["select"] = texts[0] if len(texts) == 1 else texts
        for key, values in self.values_of(hook, factor=1.0).items():
            kept = {name: body[key][name] for name in ("factor", "at") if name in body[key]}
            body[key] = {**self._stored(f"{hook.name}.{key}", values), **kept}
        self._pin_seed(hook, body)
        added = hook.action.adds(hook.name)
        if added is not None:
            self._add_learned(hook, body, added)
        self.hooks[hook.name] = body

    def _unfit(self, hook: HookSpec) -> Iterator[Problem]:
        """Why the hook cannot be handed on."""
        if hook.runs_own_functions:
            what = "runs a function of yours, and nothing in a bundle runs code"
            yield Problem(hook.where, what, f"make the run without it: ~{hook.where}")
        for key, value in hook.action.outside_values().items():
            where = f"{hook.where}.{key}"
            if isinstance(value, RunFaults):
                what = f"repeats the faults of the run {value.run}, which are of its samples"
                yield Problem(where, what, "give rate or count, with a seed")
            elif is_by_sample(value):
                what = f"takes a row for each sample, {value}: another model's data has other samples"
                yield Problem(where, what, "take one value for all: sample: mean, or the number of a sample")

    def _stored(self, name: str, values: Mapping[str, Source]) -> dict[str, Any]:
        """Keep the tensors of a value: one for all modules, or one for each; returns the value that names them."""
        tensors = dict[str, Tensor]()
        for path, value in values.items():
            if isinstance(value, PendingRun) or not isinstance(value, Tensor):
                raise spec_error(f"hooks.{name}", "is not one tensor that could be copied")
            if problem := unstorable(value):
                raise spec_error(f"hooks.{name}", problem)
            tensors[path] = value
        if len({id(tensor) for tensor in tensors.values()}) == 1:
            self.tensors[name] = next(iter(tensors.values()))
            return {"file": TENSORS, "key": name}
        for path, tensor in tensors.items():
            self.tensors[f"{name}/{path}"] = tensor
        return {"file": TENSORS, "key": f"{name}/*"}

    def _pin_seed(self, hook: HookSpec, body: dict[str, Any]) -> None:
        """Write the seed of the hook's random numbers, which is derived from that of the run."""
        seed = self.experiment.settings.seed
        at_installation = derived_seed(seed, hook.name)
        for key, given in hook.action.fields_of(Meaning.SEED).items():
            if given is None:
                body[key] = at_installation if hook.hook_type is APPLY else seed
        drawn = getattr(hook.action, "init", None)
        if isinstance(drawn, Initialiser) and drawn.seed is None:
            body["init"]["seed"] = at_installation

    def _add_learned(self, hook: HookSpec, body: dict[str, Any], name: str) -> None:
        """Replace the initial value of a parameter that the hook adds by what the run has learned."""
        folder = self.run.path / CHECKPOINTS
        kept = [each for each in ("best", "last") if (folder / f"{each}.safetensors").is_file()]
        settings = self.experiment.settings
        if not kept:
            if settings.task.name == "train" or settings.model.weights is not None:
                what = f"adds the parameter {name!r}, and the run has kept no checkpoint with its values"
                hint = "make a bundle of the run that trained it, with train.checkpoint.save: best"
                self.note(hook.where, what, hint)
            return
        self.learned = kept[0]
        path = folder / f"{kept[0]}.safetensors"
        tensors = dict[str, Tensor]()
        with open_tensors(path, self.run.path) as file:
            there = set(file.keys())
            for match in self.matches[hook.name]:
                stored = [
                    key for key in (f"{each}.{name}".lstrip(".") for each in match.names) if key in there
                ]
                if not stored:
                    raise spec_error(
                        hook.where, f"{path} has no values of {name!r} at {match.path or '(root)'}"
                    )
                tensors[match.path] = read_tensor(file, stored[0])
        body.pop("init", None)
        body["value"] = self._stored(f"{hook.name}.{name}", tensors)


def _selectors(match: Match) -> list[str]:
    """Selectors of exactly this module or parameter, or of these parameters of a module."""
    paths = [f"{match.path}.{name}".lstrip(".") for name in match.matched_parameters] or [match.path]
    return [path if _is_exact(path) else f"re:{_escaped(path)}" for path in paths]


def _is_exact(path: str) -> bool:
    with suppress(ValueError):
        selector = parse_selector(path)
        return isinstance(selector, PathSelector) and selector.exact == {path}
    return False


def _escaped(path: str) -> str:
    return "".join(each if each.isalnum() or each == "_" else f"\\{each}" for each in path)


def write_bundle(path: Path, out: Path) -> Bundling:
    """Write the bundle of a run into a new or empty folder.

    Raises SpecError that lists every hook that cannot be handed on, or says why there is nothing to hand on; StoreError
    if the files cannot be written: then there is no bundle.
    """
    run = _opened(path)
    if os.path.lexists(out) and (not out.is_dir() or out.is_symlink() or any(out.iterdir())):
        raise spec_error(OUT, f"{out} is there already, and is not an empty folder", "give another folder")
    made = _chosen(run)
    record = {
        "version": VERSION,
        "class": run.plan.get("model"),
        "seed": made.experiment.settings.seed,
        "hooks": {name: _sites(run, name) for name in made.hooks},
        "modules": run.model.get("modules", []),
        "tensors": forms_of(made.tensors),
        "call": _call(run),
    }
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with os_errors(f"cannot write {out}"):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _write(made, aside, record)
            os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(out.parent)
    return made


def _write(made: Bundling, folder: Path, record: Mapping[str, Any]) -> None:
    with new_file(folder / TENSORS) as file:
        write_tensors(file, made.tensors)
    hooks = yaml.safe_dump({"hooks": made.hooks}, sort_keys=False, allow_unicode=True)
    picture = _picture(made.run)
    texts = {
        HOOKS: hooks,
        CARD: card(made.run, made.left_out, hooks, record, made.learned, PICTURE if picture else ""),
    }
    if picture:
        texts[PICTURE] = picture
    for name, text in texts.items():
        with new_file(folder / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    write_json(folder / MODEL, record)


def _opened(path: Path) -> Run:
    """The run, if it has ended well and is unchanged."""
    if (path / MULTIRUN).is_file():
        jobs = sorted(each.parent.name for each in path.glob(f"*/{STATUS}"))
        raise spec_error(
            RUN,
            f"{path} is a sweep, and a bundle is of one run",
            f"name one of its jobs: {path / jobs[0] if jobs else path}",
        )
    try:
        run = open_run(path)
    except StoreError as error:
        names = [each.parent.name for each in path.parent.glob(f"*/{STATUS}")]
        problem = misnamed(RUN, str(error), path.name, names)
        if problem.fix is not None:
            problem = replace(problem, fix=replace(problem.fix, value=str(path.with_name(problem.fix.value))))
        raise SpecError([problem]) from error
    status = run.status["status"]
    if status not in ("done", "stopped"):
        why = run.cut_off or f"it is {status}"
        raise spec_error(RUN, f"{run.path} has not ended well: {why}", "a bundle is of a run that is done")
    if bad := verify(run.path).bad:
        lines = "\n".join(first_lines(bad))
        raise spec_error(RUN, f"{run.path} is damaged:\n{lines}", "make the run again")
    return run


def _chosen(run: Run) -> Bundling:
    """The hooks of the run that edit, with what they need."""
    if not run.config:
        what = (
            f"{run.path} has no {CONFIG}: it was recorded in a loop of your own, which keeps no configuration"
        )
        raise spec_error(RUN, what, "hand on the file of its hooks")
    try:
        config = resolved(OmegaConf.create(run.config))
    except OmegaConfBaseException as error:
        raise StoreError(f"{run.path / CONFIG} cannot be resolved: {str(error)[:300]}") from error
    config.pop(HOOKS_FROM, None)  # the hooks are there
    if config.get("hooked") is False:
        raise spec_error(RUN, f"{run.path} ran without its hooks (hooked: false)", "name a run with them")
    task = config.get("task")
    if isinstance(task, dict) and task.get("over"):
        what = "task=effects moves its hook over many places, and none of them is the edit of the run"
        raise spec_error(RUN, what, "make a run with the one that you choose, such as task=evaluate")
    made = Bundling(run, parse_experiment(config), config.get("hooks") or {})
    enabled = {hook.name: hook for hook in made.experiment.hooks.hooks if hook.keys.enabled}
    trains = run.model.get("trained")
    read = set[str]()
    for hook in enabled.values():
        values = hook.action.outside_values().values()
        read |= {value.hook for value in values if isinstance(value, PassValue)}
    edits = list[HookSpec]()
    for name, hook in enabled.items():
        in_place = hook.hook_type is APPLY and hook.action.does is None and hook.action.adds(name) is None
        if hook.action.observes and name not in read:
            made.left_out[name] = "it only observes"
        elif trains and in_place:
            made.left_out[name] = "it changed the weights before the training, and they have changed since"
        else:
            edits.append(hook)
    if all(hook.action.observes for hook in edits):
        names = ", ".join(made.left_out) or "none"
        raise spec_error(
            RUN, f"{run.path} has no hooks that edit; its hooks are: {names}", "name a run with an edit"
        )
    made.tried(made.require_same_plan)
    made.refuse()
    for hook in edits:
        made.tried(made.add_hook, hook)
    made.refuse()
    return made


def _sites(run: Run, name: str) -> list[dict[str, Any]]:
    """Where a hook was: path, names, class and shape of each module or parameter."""
    (hook,) = [hook for hook in run.plan["hooks"] if hook["name"] == name]
    return [{key: target[key] for key in ("path", "names", "class", "shape")} for target in hook["targets"]]


def _call(run: Run) -> dict[str, Any] | None:
    """The tensors of a call of the run's model, as its data describes it; None if that is not known."""
    try:
        args, kwargs = as_call(run.data_info().example(EXAMPLE_BATCH), nn.Identity())
    except HookrunError:  # its data is not here
        return None
    if not all(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return None
    return {
        "args": list(map(form_of, args)),
        "kwargs": {name: form_of(each) for name, each in kwargs.items()},
    }


def _picture(run: Run) -> str:
    """The curve of a metric of the run as SVG; ``""`` if there is none."""
    for metric in ("accuracy", "loss"):
        with suppress(HookrunError):
            return str(run.plot(metric)._repr_svg_())
    return ""
