"""The Python API: a spec from YAML or a dict, a plan from a spec and a model, hooks from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import abspath, expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from hookrun.engine.hook_types import FORWARD, FORWARD_PRE
from hookrun.engine.prove.trial import Example, Plan, compile_plan
from hookrun.engine.runtime import Installation
from hookrun.engine.spec import Spec
from hookrun.engine.spec.hook import BundleOrigin
from hookrun.engine.spec.selector import parse_selector
from hookrun.errors import HookrunError, refused_at, shortened, spec_error
from hookrun.integrations.recording import Recording, run_folder
from hookrun.run.experiment.run_values import RunValues
from hookrun.run.module_table import ModuleTable
from hookrun.run.tasks import parse_experiment
from hookrun.run.tasks.modules import modules_of, on_every_module, picked_by
from hookrun.store.bundles import read_bundle, with_bundle
from hookrun.store.config.interpolations import guarded, resolved
from hookrun.store.config.yaml_files import parsed, reading
from hookrun.store.reader import Run
from hookrun.store.reader import open_run as _open_run

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from hookrun.run.own_loop import ExperimentData


def load_spec(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    seed: int = 0,
) -> Spec:
    """The validated hooks of a YAML file, of a dict, or of an experiment in the config folders.

    source:     a file, or a dict: ``{"hooks": {...}}`` or the hooks mapping itself
    experiment: instead of `source`: the name of an experiment, composed with `overrides` as on the command line
    config_dir: a folder of your own that is searched first
    seed:       from which the hooks' own generators are derived; an experiment has its own seed

    Raises SpecError that lists every mistake.
    """
    if (source is None) == (experiment is None):
        raise spec_error("load_spec", "takes a file or a dict, or else `experiment=NAME`")
    if experiment is not None:
        from hookrun.command.compose.compose import compose_dict

        return parse_experiment(compose_dict([f"experiment={experiment}", *overrides], config_dir)).hooks
    if isinstance(source, Mapping):
        return with_bundle(source, seed)
    path = Path(str(source)).expanduser().absolute()
    with reading(path) as text, guarded():
        content = resolved(parsed(text))
    if not isinstance(content, dict):
        raise spec_error(str(path), "holds no mapping from name to hook")
    return with_bundle(content, seed)


def load_bundle(path: str | Path) -> Spec:
    """The hooks of a bundle, which `python -m hookrun.bundle RUN OUT` wrote, for `compile`, `hooked` and `record`.

    Parameters that they add get the values that the run has learned, and are trainable as they were there. Without an
    example, `compile` proves the hooks with a call of the shapes of the run.

    Raises SpecError if it is not a bundle, or if a file of it was changed.
    """
    return read_bundle(abspath(expanduser(path)), whole=True).spec


def compile(
    spec: Spec | Mapping[str, Any],
    model: Module,
    *,
    example: Example | None = None,
    training: bool | None = None,
) -> Plan:
    """Match the hooks against the model's names and check that they fit; the model is not changed.

    example:  ``(args, kwargs)`` of one call: shapes, dtypes, targets and indexes are then checked on a fake copy
    training: the mode to check in; None: the model's own

    Raises SpecError that lists every mistake in `spec`, if it is a dict; CompileError that lists every hook that does
    not fit the model; HookrunError if `model` or `example` is something else.
    """
    if example is not None:  # a tensor or a batch is a frequent mistake
        is_pair = isinstance(example, tuple) and len(example) == 2
        if not is_pair or not isinstance(example[0], tuple | list) or not isinstance(example[1], Mapping):
            raise HookrunError("example: expected (args, kwargs), for one tensor ((x,), {})")
    whole = spec if isinstance(spec, Spec) else with_bundle(spec)
    _require_model(model)
    if example is None and whole.bundle is not None:
        example = _call_of(whole.bundle, model)
    return compile_plan(whole, model, values=RunValues(), example=example, training=training)


def _call_of(bundle: BundleOrigin, model: Module) -> Example | None:
    """A call of the model that the bundle was made for, in this model's dtype, with ones; None if it is not known."""
    if bundle.call is None:
        return None
    parameter = next(filter(torch.is_floating_point, model.parameters()), None)

    def ones(form: Mapping[str, Any]) -> torch.Tensor:
        tensor = torch.ones(form["shape"], dtype=getattr(torch, form["dtype"]))
        if parameter is None:
            return tensor
        return tensor.to(parameter if tensor.is_floating_point() else parameter.device)

    kwargs = {name: ones(form) for name, form in bundle.call["kwargs"].items()}
    return list(map(ones, bundle.call["args"])), kwargs


def modules(model: Module, example: Example | None = None, select: Any = None) -> ModuleTable:
    """The modules of a model, as task=modules shows them: classes, parameters, shapes, and what a selector matches.

    example: ``(args, kwargs)`` of one call, as in `compile`: without it, no shapes
    select:  a selector of any form, as in a hook

    Raises SpecError for a broken selector, CompileError for one without matches, HookrunError as `compile` does.
    """
    _require_model(model)
    picked = list[str]()
    if select is not None:
        with refused_at("select", kinds=ValueError):
            selector = parse_selector(select)
        picked = picked_by(selector, model, "select")
    plan = compile(
        on_every_module(model, {"outputs": FORWARD.name, "inputs": FORWARD_PRE.name}), model, example=example
    )
    outputs, inputs = (modules_of(model, [hook]) for hook in plan.hooks)
    return ModuleTable(plan, outputs, inputs, str(select), picked)


def _require_model(model: Any) -> None:
    if not isinstance(model, Module):
        raise HookrunError(f"model: found {shortened(repr(model))}, expected a torch.nn.Module")


def hooked(
    model: Module,
    spec: Spec | Mapping[str, Any],
    *,
    effects: bool = False,
    scaler: GradScaler | None = None,
    strict: bool = False,
) -> Installation:
    """Compile and install in one step: ``with hookrun.hooked(model, spec) as hooks: ...``; see `Plan.install`."""
    return compile(spec, model).install(model, effects=effects, scaler=scaler, strict=strict)


def record(
    model: Module,
    spec: Spec | Mapping[str, Any],
    run_dir: str | Path | None = None,
    *,
    effects: bool = False,
    scaler: GradScaler | None = None,
    strict: bool = False,
) -> Recording:
    """`hooked` with a run directory: ``with hookrun.record(model, spec, run_dir="outputs/mine") as hooks:``.

    Captures and records are written to disk during the block, metrics by ``hooks.log(loss=loss)``; at the end the
    status, the manifest and the report are written.

    run_dir: a new or empty directory; None: ``outputs/`` and the time, as on the command line

    Raises SpecError and CompileError before the directory is created, StoreError on entry if it is not empty.
    """
    plan = compile(spec, model)
    folder = run_folder(run_dir)
    latest = run_dir is None
    return Recording(plan, model, folder, effects=effects, scaler=scaler, strict=strict, latest=latest)


def build(
    *,
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> tuple[Module, ExperimentData]:
    """The model (with its weights, on its device) and the data of an experiment, as in a run.

    experiment: its name, composed with `overrides` as on the command line; None: the defaults and `overrides`
    overrides:  may contain ``+trust=[mypkg]`` for your own model or data; HOOKRUN_TRUST works as well
    config_dir: a folder of your own that is searched first

    The model has no hooks; `load_spec` with the same arguments returns them. Raises SpecError, also if its weights come
    from a run of `needs` that does not exist.
    """
    from hookrun.command.compose.compose import compose_dict
    from hookrun.command.compose.hydra import existing_folder
    from hookrun.command.compose.overrides import take_trust
    from hookrun.command.sweeps.needs import with_made_needs
    from hookrun.engine.trust import of_environment
    from hookrun.run.own_loop import parts

    typed, others = take_trust(overrides)
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    trust = typed | of_environment()
    composed = parse_experiment(compose_dict([*chosen, *others], config_dir))
    if composed.settings.needs:
        folder = None if config_dir is None else existing_folder("config_dir", config_dir)
        composed = with_made_needs(composed, [*chosen, *others], folder, trust)
    return parts(composed, trust)


def open_run(path: str | Path) -> Run:
    """Read a run directory, lazily. Raises HookrunError if there is none."""
    return _open_run(path)
