"""`hookrun.run` and `hookrun.sweep`: what the command line does, in this process, from Python."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.errors import (
    CheckFailed,
    HookrunError,
    HookrunWarning,
    Refusal,
    listed,
    paths_refused,
    reason,
    shown,
    spec_error,
)
from hookrun.run.experiment.given import Given

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.command.outcome import Outcome
    from hookrun.store.reader import Run
    from hookrun.store.runs import Runs

_in_use = threading.RLock()
"""Hydra has one state for the whole process; a run may start another one, in its own thread."""


def run(
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    model: Module | None = None,
    data: Any = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
) -> Run:
    """Run an experiment in this process, as ``hookrun experiment=NAME OVERRIDES`` does, and open its directory.

    ``hookrun.run("clip_fc", ["train.epochs=1"])``: the same checks, the same numbers, the same files.

    experiment: its name; None: the defaults and `overrides`, as in ``hookrun.run(overrides=["resume=latest"])``
    overrides:  as on the command line; may contain ``+trust=[mypkg]`` for your own code
    config_dir: a folder of your own that is searched first
    model:      a module of your own in place of ``model.*``; a training changes it
    data:       a data set, a loader, a list of samples, or a mapping from split to one of these, in place of
                ``data.*``; without a split it is `train` for a task that trains, else `val`
    run_dir:    a new or empty directory; None: ``outputs/`` and the time
    quiet:      print nothing

    It is one run also where a file has ``hydra.mode: MULTIRUN``: see `hookrun.sweep`. torch's default dtype and device,
    gradients and random generators are those of a new process during the run, and then the caller's again.

    Raises SpecError and CompileError before anything is written. Of a run that has begun, what ended it: CheckFailed,
    also where a check with ``policy: stop`` did that, another HookrunError, or the exception of a model. Its directory
    stays, and a note of the exception names it. After Ctrl-C KeyboardInterrupt, when the state is saved.
    """
    typed = _typed(experiment, overrides)
    _refuse_sweep(typed)
    if run_dir is not None:
        typed.append(_directory("run_dir", "hydra.run.dir", run_dir, typed))
    code, outcome = _performed("--run", typed, config_dir, Given(model, data), quiet)
    from hookrun.store.reader import open_run

    if code or outcome.run_dir is None:
        raise HookrunError(f"the run ended with exit code {code}")
    return open_run(outcome.run_dir)


def sweep(
    experiment: str | None = None,
    values: Mapping[str, Iterable[Any]] | None = None,
    *,
    baseline: bool = False,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    model: Module | None = None,
    data: Any = None,
    sweep_dir: str | Path | None = None,
    quiet: bool = False,
) -> Runs:
    """Run an experiment once for each combination of values, one after the other, as ``hookrun -m`` does.

    ``hookrun.sweep("clip_fc", {"hooks.clip_fc.max": [0.001, 0.01]}, baseline=True)``

    values:    key -> its values: numbers, texts, None, lists or mappings; of a group such as `model` the names. None: a
               file or `overrides` have them, or ``resume=DIR`` names a sweep to go on with
    baseline:  run it without hooks as well, for comparison
    sweep_dir: a new directory; None: ``multirun/`` and the time

    The others are those of `run`; each job has a copy of `model`. Returns the runs in the order of the jobs, the
    baseline first. A job that fails does not end the sweep: it is among the runs with its status, and HookrunWarning
    says so.

    Raises SpecError and CompileError before anything is written, if one of the jobs is wrong.
    """
    from hookrun.command.compose.written import sweep_override
    from hookrun.store.files import by_number
    from hookrun.store.runs import Runs, runs

    if values is not None and not isinstance(values, Mapping):
        raise spec_error("values", f"found {shown(values)}, expected a mapping", 'write {"seed": [1, 2]}')
    typed = _typed(experiment, overrides)
    typed += [sweep_override(key, each) for key, each in (values or {}).items()]
    if baseline:
        typed.append("baseline=true")
    if sweep_dir is not None:
        typed.append(_directory("sweep_dir", "hydra.sweep.dir", sweep_dir, typed))
    code, outcome = _performed("--multirun", typed, config_dir, Given(model, data), quiet)
    assert outcome.sweep_dir is not None
    found = runs(outcome.sweep_dir)
    jobs = sorted(found.summaries, key=lambda job: by_number(job.name))
    if code:
        failed = [job.name for job in jobs if job.status != "done"]
        done = f"{len(jobs) - len(failed)} of {len(jobs)} jobs done"
        what = f"sweep: {done}, in {found.folder}; not done: {listed(failed)}"
        warnings.warn(HookrunWarning(what), stacklevel=2)
    return Runs(found.folder, jobs)


def _typed(experiment: str | None, overrides: Sequence[str]) -> list[str]:
    """What would be typed. Raises SpecError for what is not a list of overrides."""
    from hookrun.command.compose.written import override

    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise spec_error(
            "overrides", f"found {shown(overrides)}, expected a list", 'write ["train.epochs=1"]'
        )
    for text in overrides:
        if not isinstance(text, str) or text.startswith("-"):
            hint = "a setting is written key=value, flags are arguments of the function, -m is hookrun.sweep"
            raise spec_error("overrides", f"{shown(text)} is not a setting", hint)
    if experiment is None:
        return list(overrides)
    if not isinstance(experiment, str) or not experiment:
        raise spec_error("experiment", f"found {shown(experiment)}, expected a name", "see `hookrun --help`")
    return [override("experiment", experiment), *overrides]


def _refuse_sweep(typed: Sequence[str]) -> None:
    """Raise SpecError where the sweep of a directory would be resumed."""
    from hookrun.command.compose.overrides import RESUME, take_resume
    from hookrun.command.sweeps.resumed import is_sweep

    resume, _ = take_resume(typed)
    if resume is not None and is_sweep(resume.name):
        hint = "hookrun.sweep(overrides=[…]) goes on with it"
        raise spec_error(RESUME, f"{resume.name} is the directory of a sweep, not of a run", hint)


def _directory(argument: str, key: str, path: str | Path, typed: Sequence[str]) -> str:
    """The override that sets the directory. SpecError where it is set twice, or has files."""
    from hookrun.command.compose.overrides import RESUME
    from hookrun.command.compose.written import override
    from hookrun.engine.keys import key_of
    from hookrun.integrations.recording import run_folder
    from hookrun.store.config.interpolations import literal
    from hookrun.store.runs import is_run

    for text in typed:
        if key_of(text) in (key, RESUME):
            raise spec_error(argument, f"{text} chooses the directory, too", "leave one of them out")
    folder = run_folder(path)
    if (
        folder.is_dir() and any(folder.iterdir()) and not is_run(folder)
    ):  # the command says what to do with a run
        raise spec_error(argument, f"{folder} is not empty", "give a new or an empty directory")
    return override(key, literal(str(folder)))


def _performed(
    flag: str, overrides: Sequence[str], config_dir: str | Path | None, given: Given, quiet: bool
) -> tuple[int, Outcome]:
    """Carry out the command in this process; returns its exit code, and what it did. Raises what ended a run."""
    from hookrun.command.cli import entered
    from hookrun.command.cli.commands import execute
    from hookrun.command.compose.hydra import existing_folder
    from hookrun.command.outcome import Outcome
    from hookrun.command.sweeps.exit_codes import CHECK
    from hookrun.run.ranks import size_of_world
    from hookrun.signals import handled
    from hookrun.store.reader import open_run

    if (size := size_of_world()) > 1:
        what = f"found {size} processes (WORLD_SIZE), and this is for one"
        raise spec_error("hookrun.run", what, "start them by torchrun … -m hookrun …")
    arguments = [flag, *overrides]
    if config_dir is not None:
        arguments[:0] = ["--config-dir", str(existing_folder("config_dir", config_dir))]
    outcome = Outcome(from_python=True)
    try:
        with _alone(), _torch_as_new(), _silent(quiet), entered(arguments), handled(), paths_refused():
            code = execute(arguments, outcome, given)
        for error in outcome.errors:
            raise error
        if outcome.run_dir is not None and code == CHECK:
            raise CheckFailed(f"{outcome.stopped}: {open_run(outcome.run_dir).status.get('reason')}")
        return code, outcome
    except Refusal as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise error.with_traceback(None) from None  # the message says where the mistake is
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None  # nothing of it is a mistake
    except SystemExit as error:  # it would end the caller's process, maybe as if all were well
        raise HookrunError(f"a function of the experiment has called sys.exit: {reason(error)}") from error
    except Exception as error:
        if outcome.run_dir is not None:
            error.add_note(f"run directory: {outcome.run_dir}")
        raise


@contextmanager
def _alone() -> Iterator[None]:
    """In the block no other thread of the process runs an experiment. Raises HookrunError where one does."""
    if not _in_use.acquire(blocking=False):
        raise HookrunError(
            "hookrun.run: another thread of this process is running an experiment, and Hydra has one state for all\n"
            "    wait until it has ended, or use a process for each"
        )
    try:
        yield
    finally:
        _in_use.release()


@contextmanager
def _torch_as_new() -> Iterator[None]:
    """In the block torch's default dtype, device and gradient mode are those of a new process."""
    torch = sys.modules.get("torch")
    if torch is None:  # nobody has changed them
        yield
        return
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def _silent(quiet: bool) -> Iterator[None]:
    """In the block nothing is printed, if `quiet`."""
    if not quiet:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield
