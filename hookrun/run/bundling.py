"""Writes a bundle: the hooks of a run that edit, and a copy of every tensor that they need.

Values are read again from where the run had them, and must be the same: the hash of the plan tells. A selector becomes
the modules that it matched, so that a model with more of them is edited where the run's model was.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from hookrun.engine.actions.autoencoders import CONFIG as AUTOENCODER
from hookrun.engine.actions.autoencoders import WEIGHTS, Autoencoder
from hookrun.engine.actions.values import FolderValue, OutsideValue, RunFaults, is_by_sample
from hookrun.engine.hook_types import APPLY
from hookrun.engine.keys import HOOKS_FROM
from hookrun.engine.plan.outside import Source
from hookrun.engine.plan.plan import Match, PlannedHook, ResolvedPlan, passed_on
from hookrun.engine.plan.resolve import captured_as
from hookrun.engine.plan.table import text
from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.hook import BundleOrigin
from hookrun.engine.trust.callables import Code
from hookrun.errors import HookrunError, first_lines, refused_at, spec_error
from hookrun.run.bundle_card import card_text
from hookrun.run.experiment.model_task import ModelTask
from hookrun.run.experiment.prepared import EXAMPLE_BATCH, as_call
from hookrun.run.experiment.run_values import RunReferences, read_value
from hookrun.run.tasks import parse_experiment, task_of
from hookrun.store.bundles import CARD, HOOKS, PICTURE, TENSORS, VERSION, folder_files, form_of, read_bundle
from hookrun.store.captures.tensor_file import open_tensors, read_tensor, write_tensors
from hookrun.store.config.interpolations import resolved
from hookrun.store.config.stored import read_yaml
from hookrun.store.files import new_file, new_folder, os_errors, write_json
from hookrun.store.format import CHECKPOINTS, CONFIG, MODEL, OVERRIDES, PLAN
from hookrun.store.manifest import hashed
from hookrun.store.objective import preferred
from hookrun.store.reader import Run, open_run
from hookrun.store.scores import names
from hookrun.store.verify import verify


@dataclass
class Bundling:
    """A bundle that is being made of a run.

    plan:     of the run; then of the hooks that go into the bundle
    left_out: hook -> why it does not
    hooks:    name -> hook as in hooks.yaml
    tensors:  key -> tensor, as in tensors.safetensors
    folders:  name -> the autoencoder in a folder of this name
    """

    run: Run
    plan: ResolvedPlan
    left_out: dict[str, str]
    hooks: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    folders: dict[str, Autoencoder] = field(default_factory=dict)

    def add(self, hook: PlannedHook, written: Mapping[str, Any], runs: RunReferences) -> None:
        """Add a hook of the run's configuration, with its values."""
        body = {"enabled": True, **written, "select": _selectors(hook)}
        values = hook.spec.action.outside_values()
        for name in hook.added:
            learned = self._learned(hook, name)
            if learned is not None:
                body["value"] = learned
                body.pop("init", None)
                values.pop("value", None)
        for key, value in values.items():
            name = f"{hook.spec.name}.{key}"
            if isinstance(value, FolderValue):
                (autoencoder,) = set(hook.values[key].values())
                assert isinstance(autoencoder, Autoencoder)
                self.folders[name] = autoencoder
                body[key] = {"folder": name}
            elif isinstance(value, OutsideValue):
                kept = {part: body[key][part] for part in ("factor", "at") if part in body[key]}
                body[key] = kept | self._keep(
                    name, _read(hook, key, value.model_copy(update={"factor": 1.0}), runs)
                )
        self.hooks[hook.spec.name] = body

    def _learned(self, hook: PlannedHook, name: str) -> dict[str, Any] | None:
        """Keep the parameters of this name that the run has trained; None if it has not saved any."""
        folder = self.run.path / CHECKPOINTS
        kept = [folder / "best.safetensors", folder / "last.safetensors"]
        path = next(filter(Path.is_file, kept), None)
        if path is None:
            if self.run.model.get("trained") or self.run.model.get("weights") != "random":
                what = f"adds the parameter {name!r}, and the run has no checkpoint with its values"
                hint = "name the run that trained it, with train.checkpoint.save=best"
                raise spec_error(hook.spec.where, what, hint)
            return None
        values: dict[str, Tensor] = {}
        with open_tensors(path, self.run.path) as file:
            stored = set(file.keys())
            for match in hook.matches:
                names = {f"{each}.{name}".lstrip(".") for each in match.names}
                for key in stored & names:
                    values[match.path] = read_tensor(file, key)
        if len(values) < len(hook.matches):
            raise spec_error(hook.spec.where, f"{path} does not have the parameter {name!r} of every module")
        return self._keep(f"{hook.spec.name}.{name}", values)

    def _keep(self, name: str, values: Mapping[str, object]) -> dict[str, Any]:
        """Keep a value, path of a module -> tensor; returns what names it in hooks.yaml."""
        is_one = len(set(map(id, values.values()))) == 1
        for path, value in values.items():
            assert isinstance(value, Tensor)  # values by sample have been refused
            self.tensors[name if is_one else f"{name}/{path}"] = value
        return {"file": TENSORS, "key": name if is_one else f"{name}/*"}


def write_bundle(path: Path, out: Path) -> Bundling:
    """Write the bundle of a run into a new or empty folder.

    Raises SpecError for a hook that cannot be handed on, or if there is none; StoreError if the files cannot be
    written, after which there is no bundle.
    """
    made = _of_run(_opened(path))
    out = out.absolute()
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise spec_error("OUT", f"{out} is there already, and is not an empty folder", "give another folder")
    with os_errors(f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(out) as aside:
            _write(made, aside)
    return made


def _opened(path: Path) -> Run:
    """The run, which has ended well and is unchanged."""
    with refused_at("RUN"):
        run = open_run(path)
    if run.status["status"] not in ("done", "stopped"):
        why = run.cut_off or f"it is {run.status['status']}"
        raise spec_error("RUN", f"{run.path} has not ended well: {why}", "name a run that is done")
    if bad := verify(run.path).bad:
        what = "\n".join([f"{run.path} is damaged:", *first_lines(bad)])
        raise spec_error("RUN", what, "make the run again")
    if not run.config:
        what = f"{run.path} has no {CONFIG}: it was recorded in a loop of your own, and that stores no hooks as written"
        hint = (
            "hand on the file of its hooks, or bundle a run of them: hookrun.run(EXPERIMENT, model=…, data=…)"
        )
        raise spec_error("RUN", what, hint)
    return run


def _of_run(run: Run) -> Bundling:
    """The hooks of the run that edit, with what they need."""
    with refused_at("RUN", kinds=(HookrunError, ValueError), what=f"{run.path / CONFIG}: "):
        config = resolved(OmegaConf.create(run.config))
    config.pop(HOOKS_FROM, None)  # the hooks are there
    experiment = parse_experiment(config)
    task = task_of(experiment)
    if not isinstance(task, ModelTask) or getattr(task, "over", None):
        what = f"{run.path}: task={task.name} has no hooks, or runs a hook in many forms"
        raise spec_error("RUN", what, "name a run with one edit, such as of task=evaluate")
    places = {record["run"]: record["path"] for record in run.plan.get("runs", [])}
    runs = RunReferences(places, experiment.settings, task.splits[0])
    specs = [spec for spec in experiment.hooks.hooks if spec.keys.enabled]
    plan = _planned(run, specs, runs)
    left_out = _left_out(plan, trained=bool(run.model.get("trained")))
    hooks = tuple(hook for hook in plan.hooks if hook.spec.name not in left_out)
    if all(hook.spec.action.observes for hook in hooks):
        why = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        if not experiment.settings.hooked:
            why = "it ran without them (hooked: false)"
        raise spec_error("RUN", f"{run.path} has no hooks that edit; {why}", "name a run with an edit")
    made = Bundling(run, replace(plan, hooks=hooks), left_out)
    for hook in hooks:
        made.add(hook, config["hooks"][hook.spec.name], runs)
    return made


def _left_out(plan: ResolvedPlan, *, trained: bool) -> dict[str, str]:
    """Name of a hook -> why it is not handed on; trained: the run has trained the model."""
    passed = {name for name, _ in passed_on(plan.hooks)}
    reasons: dict[str, str] = {}
    for hook in plan.hooks:
        action = hook.spec.action
        name = hook.spec.name
        writes = hook.spec.hook_type is APPLY and action.does is None and not hook.added
        if not hook.matches:
            reasons[name] = "it matched nothing"
        elif action.observes and name not in passed:
            reasons[name] = "it only observes"
        elif writes and trained:
            reasons[name] = "it changed the weights before they were trained"
    return reasons


def _selectors(hook: PlannedHook) -> str | list[str]:
    """Exactly the modules or parameters that the hook had."""
    paths: list[str] = []
    for match in hook.matches:
        parameters = [f"{match.path}.{name}".lstrip(".") for name in match.matched_parameters]
        paths += parameters or [match.path]
    return paths if len(paths) > 1 else paths[0]


def _planned(run: Run, specs: list[HookSpec], runs: RunReferences) -> ResolvedPlan:
    """The plan of the run, with the values of its hooks as they are now. SpecError unless it is still the same."""
    plan = run.plan
    by_name = {spec.name: spec for spec in specs}
    stored = plan.get("hooks", [])
    if by_name.keys() != {hook["name"] for hook in stored}:
        raise spec_error("RUN", f"{run.path}: {CONFIG} and {PLAN} have different hooks", "make the run again")
    hooks: list[PlannedHook] = []
    for hook in stored:
        spec = by_name[hook["name"]]
        _require_portable(spec)
        planned = PlannedHook(spec, tuple(map(_match, hook.get("targets", []))))
        given = spec.action.outside_values()
        values = {key: _read(planned, key, value, runs) for key, value in given.items()}
        hooks.append(replace(planned, values=values))
    broken = f"{run.path / PLAN} is not a whole plan: "
    with refused_at("RUN", kinds=(AttributeError, KeyError, TypeError), what=broken):
        code = {
            where: Code(each["function"], each["sha256"], each["hashed"])
            for where, each in plan.get("code", {}).items()
        }
        bundle = BundleOrigin("", plan["bundle"]["sha256"], "", {}) if "bundle" in plan else None
        again = ResolvedPlan(plan["model"], tuple(hooks), plan["seed"], code=code, bundle=bundle)
    if again.hash != plan.get("hash"):
        what = "files or runs from which its hooks take values have changed since"
        raise spec_error("RUN", f"{run.path}: {what}", "make the run again")
    return again


def _match(target: Mapping[str, Any]) -> Match:
    """A module or parameter as plan.json has it, without its size."""
    return Match(
        path=target["path"],
        names=tuple(target.get("names", ())),
        type=target.get("class") or "",
        parameters=0,
        shape=target.get("shape"),
        matched_parameters=tuple(target.get("own", ())),
    )


def _require_portable(spec: HookSpec) -> None:
    """Raise SpecError if the hook needs code, or samples of this run's data."""
    for key in spec.action.own_functions():
        what = "names a function of yours, and nothing in a bundle runs code"
        raise spec_error(f"{spec.where}.{key}", what, f"make a run without the hook: ~{spec.where}")
    for key, value in spec.action.outside_values().items():
        if isinstance(value, RunFaults) or is_by_sample(value):
            what = f"takes what belongs to samples of a run, {value}, and a bundle is for any data"
            raise spec_error(f"{spec.where}.{key}", what, "give one value for all, such as sample: mean")


def _read(hook: PlannedHook, key: str, value: Any, runs: RunReferences) -> dict[str, Source]:
    """Path of a match -> the value of a parameter there."""
    places = {match.path: captured_as(hook.spec, match) for match in hook.matches}
    with refused_at(f"{hook.spec.where}.{key}"):
        return read_value(value, places, runs)


def _write(made: Bundling, folder: Path) -> None:
    for name, content in _texts(made).items():
        with new_file(folder / name) as file:
            file.write(content.encode("utf-8", "backslashreplace"))
    write_json(folder / MODEL, _record(made, _write_values(made, folder)))
    read_bundle(folder, "OUT", whole=True)  # what a reader would refuse is not written


def _texts(made: Bundling) -> dict[str, str]:
    """Name of a file -> its text: the hooks, the card and its picture."""
    run = made.run
    texts = {HOOKS: yaml.safe_dump({"hooks": made.hooks}, sort_keys=False, allow_unicode=True)}
    metric = preferred(names(run.metrics)) or ""
    with suppress(HookrunError):
        texts[PICTURE] = run.plot(metric.rpartition("/")[2])._repr_svg_()
    typed = read_yaml(run.path / OVERRIDES, run.path) or []
    command = f"python -m hookrun {shlex.join(map(str, typed))}"
    texts[CARD] = card_text(run, text(made.plan), made.left_out, command, has_picture=PICTURE in texts)
    return texts


def _record(made: Bundling, files: Mapping[str, str]) -> dict[str, Any]:
    """model.json; files: the hash of each file in a folder."""
    sites: dict[str, Any] = {}
    for hook in made.plan.hooks:
        sites[hook.spec.name] = [
            {"path": each.path, "class": each.type, "shape": each.shape} for each in hook.matches
        ]
    return {
        "version": VERSION,
        "class": made.plan.model,
        "seed": made.plan.seed,
        "hooks": sites,
        "modules": made.run.model.get("modules", []),
        "tensors": {name: form_of(tensor, hashed=True) for name, tensor in made.tensors.items()},
        "files": files,
        "call": _call(made.run),
    }


def _write_values(made: Bundling, folder: Path) -> dict[str, str]:
    """Write the tensors and the autoencoders; returns the hash of each file of these."""
    with new_file(folder / TENSORS) as file:
        write_tensors(file, made.tensors)
    hashes: dict[str, str] = {}
    for name, autoencoder in made.folders.items():
        (folder / name).mkdir()
        write_json(folder / name / AUTOENCODER, autoencoder.config.model_dump(exclude_unset=True))
        with new_file(folder / name / WEIGHTS) as file:
            write_tensors(file, autoencoder.tensors)
        for each in folder_files(name):
            hashes[each] = hashed(folder / each)[1]
    return hashes


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
