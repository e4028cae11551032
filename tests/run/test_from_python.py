"""`hookrun.run` and `hookrun.sweep` do what the command line does, and leave the process as it was."""

from __future__ import annotations

import inspect
import logging
import os
import pydoc
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from small_runs import SMALL

import hookrun
from hookrun import in_process
from hookrun.cli import main
from hookrun.command.compose.written import sweep_override
from hookrun.store.verify import verify

SHORT = [*SMALL, "model=mlp", "train.epochs=2", "train.limit_batches=4", "train.log_every=1"]
SEEN = "+hooks.seen={select: fc, hook: forward, action: capture, when: {mode: eval}}"
CLOCKS = {"status.json", "env.json", ".hydra/hydra.yaml", "manifest.json", "report.html"}
"""Files of a run that hold a time, its directory, or hashes of these."""
TWO_LAYERS = """
def __init__(self):
    super().__init__()
    self.fc = nn.Linear(64, 10)
    self.batches = 0

def forward(self, x):
    if self.training:
        self.batches += 1
    if self.training and self.batches == 3:
        {third}
    return self.fc(x.flatten(1))
"""
INTERRUPT_ONCE = """import os, pathlib
        if pathlib.Path("run/status.json").exists() and not pathlib.Path("interrupted").exists():
            pathlib.Path("interrupted").mkdir()
            os.kill(os.getpid(), 2)
"""


def contents(run_dir: Path) -> dict[str, bytes]:
    """Each file of a run without clocks."""
    files = {path.relative_to(run_dir).as_posix(): path for path in run_dir.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in CLOCKS}


def failure(call: Callable[..., Any], *args: Any, **options: Any) -> BaseException:
    """What a call raises."""
    with pytest.raises(BaseException) as raised:
        call(*args, **options)
    return raised.value


# ---- the same run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _torch_of_a_notebook() -> Any:
    """What notebooks set for the whole process."""
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("_torch_of_a_notebook")
def test_it_equals_the_run_of_the_command_line(tmp_path: Path) -> None:
    with torch.device("cpu"), torch.enable_grad():
        torch.set_default_dtype(torch.float32)
        assert main([f"hydra.run.dir={tmp_path}/typed", "experiment=clip_fc", *SHORT, SEEN]) == 0
        torch.set_default_dtype(torch.float64)
    typed = hookrun.open_run("typed")
    called = hookrun.run("clip_fc", [*SHORT, SEEN], run_dir="called")
    assert called.path == tmp_path / "called"
    assert called.metrics == typed.metrics
    assert len(called.metrics) > 6
    assert called.plan["hash"] == typed.plan["hash"]
    ours, theirs = contents(called.path), contents(typed.path)
    ours[".hydra/overrides.yaml"] = theirs[".hydra/overrides.yaml"] = b"with the directory"
    assert ours == theirs
    assert verify(called.path).bad == []
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_device().type == "meta"
    assert not torch.is_grad_enabled()


def test_what_is_global_is_the_callers_again(tmp_path: Path) -> None:
    def state() -> list[Any]:
        random_states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        of_logs = [logging.getLogger().handlers[:], logging.getLogger("hydra").handlers[:]]
        of_torch = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]
        return [random_states, handlers, of_logs, of_torch, sys.argv, os.getcwd(), sys.stdout, sys.stderr]

    before = state()
    hookrun.run("clip_fc", [*SHORT, "hydra.job.chdir=true"])
    hookrun.sweep("clip_fc", {"seed": [1]}, overrides=SHORT)
    failure(hookrun.run, "clip_fc", ["train.epochs=x"])
    assert state() == before


def test_an_applications_own_hydra_stays() -> None:
    with initialize_config_module("hookrun", version_base="1.3"):
        before = GlobalHydra.instance().hydra
        assert hookrun.run("clip_fc", SHORT).status["status"] == "done"
        assert GlobalHydra.instance().hydra is before
        assert compose(overrides=["+a=1"]).a == 1


@pytest.mark.parametrize("name", ["a b,c=d", "it's {x} [1]", "é/\u65e5"])
def test_its_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    run = hookrun.run("clip_fc", SHORT, run_dir=name)
    assert run.path == tmp_path / name
    assert verify(run.path).bad == []
    assert "already holds a run" in str(failure(hookrun.run, "clip_fc", SHORT, run_dir=name))


def test_quiet_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    hookrun.run("clip_fc", SHORT, quiet=True)
    hookrun.sweep("clip_fc", {"seed": [1, 2]}, overrides=SHORT, quiet=True)
    assert capfd.readouterr() == ("", "")
    hookrun.run("clip_fc", SHORT)
    assert "run directory: " in capfd.readouterr().out


# ---- what does not end well -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["train.epochs=x"], hookrun.SpecError, "train.epochs: found 'x'"),
        (["hooks.clip_fc.select=fcc"], hookrun.CompileError, "did you mean 'fc'"),
        (["task=plan"], hookrun.SpecError, "hookrun.compile("),
        (["task=modules"], hookrun.SpecError, "hookrun.modules(model)"),
        (["--help"], hookrun.SpecError, "'--help' is not a setting"),
        ("seed=1", hookrun.SpecError, "expected a list"),
        ([1], hookrun.SpecError, "1 is not a setting"),
        (["resume=nowhere"], hookrun.SpecError, "there is no directory"),
    ],
)
def test_a_refused_run_leaves_no_directory(
    overrides: Any, kind: type[Exception], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = failure(hookrun.run, "clip_fc", overrides)
    assert type(error) is kind
    assert said in str(error)
    assert error.__cause__ is None, "a notebook would show both"
    assert list(Path().iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_the_error_of_a_model_is_raised_as_it_is(own_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed = own_model(TWO_LAYERS.format(third="raise ArithmeticError('mine')"))
    error = failure(hookrun.run, None, [*SHORT, *typed], run_dir="failed")
    assert type(error) is ArithmeticError
    assert error.__notes__ == [f"run directory: {Path('failed').absolute()}"]
    run = hookrun.open_run("failed")
    assert run.status["status"] == "failed"
    assert "mine" in (run.path / "error.txt").read_text()
    assert "mine" not in capsys.readouterr().err, "it would be told twice"


def test_a_model_that_exits_does_not_end_the_caller(own_model: Any) -> None:
    error = failure(hookrun.run, None, [*SHORT, *own_model(TWO_LAYERS.format(third="raise SystemExit(0)"))])
    assert type(error) is hookrun.HookrunError
    assert "SystemExit: 0" in str(error)


@pytest.mark.parametrize(("policy", "status"), [("stop", "stopped"), ("error", "failed")])
def test_a_check_that_ends_a_run_is_check_failed(policy: str, status: str) -> None:
    check = f"+hooks.c={{select: fc, hook: forward, action: check, max: 0, policy: {policy}}}"
    error = failure(hookrun.run, None, [*SHORT, check], run_dir="checked")
    assert type(error) is hookrun.CheckFailed
    assert "hook 'c'" in str(error)
    assert hookrun.open_run("checked").status["status"] == status


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """SIGINT has Python's own handler: a background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_an_interrupted_run_can_be_resumed(own_model: Any) -> None:
    typed = [*SHORT, *own_model(TWO_LAYERS.format(third=INTERRUPT_ONCE))]
    error = failure(hookrun.run, None, typed, run_dir="run")
    assert isinstance(error, KeyboardInterrupt)
    assert len(traceback.extract_tb(error.__traceback__)) < 6, "of the test, and of what raises it"
    assert hookrun.open_run("run").status["status"] == "interrupted"
    resumed = hookrun.run(overrides=["resume=run"])
    whole = hookrun.run(None, typed, run_dir="whole")
    assert resumed.path == Path("run").absolute()
    assert resumed.metrics == whole.metrics
    assert hookrun.run(overrides=["resume=run"]).status == resumed.status, "it is done"
    assert "chooses the directory, too" in str(failure(hookrun.run, None, ["resume=run"], run_dir="x"))


def test_a_folder_with_files_is_not_a_new_directory() -> None:
    Path("notes.txt").touch()
    for function, argument in ((hookrun.run, "run_dir"), (hookrun.sweep, "sweep_dir")):
        error = failure(function, "clip_fc", overrides=SHORT, **{argument: "."})
        assert f"{argument}: {Path.cwd()} is not empty" in str(error)
    assert [path.name for path in Path().iterdir()] == ["notes.txt"]


def test_a_run_in_a_thread_and_one_inside_a_run(
    trusted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    trusted(probes="def probe(x):\n    calls.pop()() if calls else None\n    return x\n\n\ncalls = []\n")
    hook = "+hooks.p={select: fc, hook: forward, action: python, function: 'probes:probe'}"
    typed = [*SHORT, "task=evaluate", hook]
    results = list[Any]()

    def attempt() -> None:
        try:
            results.append(hookrun.run("clip_fc", SHORT).metrics)
        except hookrun.HookrunError as error:
            results.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    in_thread()
    import probes  # type: ignore[import-not-found]

    probes.calls[:] = [attempt, in_thread]
    run = hookrun.run(None, typed)
    alone, refused, inside = results
    assert alone == inside
    assert "another thread" in refused
    probes.calls.clear()
    assert run.metrics == hookrun.run(None, typed).metrics


def test_several_processes_are_sent_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in str(failure(hookrun.run, "clip_fc", SHORT))


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_equals_that_of_the_command_line() -> None:
    typed = ["experiment=clip_fc", *SHORT, "hooks.clip_fc.max=0.001,0.01", "baseline=true"]
    assert main(["-m", *typed, "hydra.sweep.dir=typed"]) == 0
    swept = {"hooks.clip_fc.max": np.array([0.001, 0.01])}
    runs = hookrun.sweep("clip_fc", swept, overrides=SHORT, baseline=True, sweep_dir="called, too")
    assert [run.path for run in runs] == [Path(f"called, too/{number}").absolute() for number in range(3)]
    about = [[text for text in job.overrides if "hook" in text] for job in runs.summaries]
    assert about == [["hooked=false"], ["hooks.clip_fc.max=0.001"], ["hooks.clip_fc.max=0.01"]]
    for number, run in enumerate(runs):
        other = hookrun.open_run(f"typed/{number}")
        assert run.metrics == other.metrics
        assert run.plan["hash"] == other.plan["hash"]
        assert (run.path / "job.json").read_bytes() == (other.path / "job.json").read_bytes()


VALUES = [
    "a,b", "it's", "", "null", "x\\", "range(1,3)", None, 1e-5, float("inf"), [1, "a,b", None],
    {"a": {"b c": "d:e"}}, Path("/a b"), np.int64(3), torch.tensor(2.5),
]  # fmt: skip


def test_a_swept_value_arrives_as_it_is() -> None:
    few = [*SMALL, "model=mlp", "task=evaluate", "train.limit_batches=1"]
    runs = hookrun.sweep(None, {"+vars.x": VALUES}, overrides=few, quiet=True)
    arrived = [run.config["vars"]["x"] for run in runs]
    assert repr(arrived) == repr([*VALUES[:-3], "/a b", 3, 2.5])


words = st.text(st.sampled_from("ab ,'\"\\=:[]{}()$~\n"), max_size=6).filter(lambda text: "${" not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", "d1"]), each, max_size=2)
    ),
    max_leaves=4,
)


@given(st.lists(values, min_size=2, max_size=4))
def test_hydra_reads_the_values_that_were_given(several: list[Any]) -> None:
    parser = OverridesParser.create()
    (swept,) = parser.parse_overrides([sweep_override("vars.x", several)])
    jobs = parser.parse_overrides([f"vars.x={text}" for text in swept.sweep_string_iterator()])
    assert repr([job.value() for job in jobs]) == repr(several)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seed": 1}, "expected a list of values"),
        ({"seed": "1,2"}, "expected a list of values"),
        ({"seed": []}, "the list of values is empty"),
        ({"seed": [object()]}, "cannot be written as an override"),
        ({"vars.x": [{"a:b": 1}]}, "cannot be written as an override"),
        ({"vars.x": [np.ones(2)]}, "cannot be written as an override"),
        ({"a=b": [1]}, "is not the name of a key"),
        ({3: [1]}, "is not the name of a key"),
        ([1, 2], "expected a mapping"),
        ({"hooks.clip_fc.maxx": [1, 2]}, "did you mean 'hooks.clip_fc.max'"),
        ({"seed": range(20_000)}, "more than 10,000 jobs"),
    ],
)
def test_a_refused_sweep_leaves_no_directory(values: Any, said: str) -> None:
    error = failure(hookrun.sweep, "clip_fc", values)
    assert type(error) is hookrun.SpecError
    assert said in str(error)
    assert list(Path().iterdir()) == []


def test_a_failed_job_is_among_the_runs() -> None:
    check = "+hooks.c={select: fc, hook: forward, action: check, max: 0}"
    with pytest.warns(hookrun.HookrunWarning, match="1 of 2 jobs done, .*; not done: 0"):
        runs = hookrun.sweep(None, {"hooks.c.max": [0, 1e9]}, overrides=[*SHORT, check])
    assert [run.status["status"] for run in runs] == ["failed", "done"]
    assert "is the directory of a sweep" in str(failure(hookrun.run, None, [f"resume={runs.folder}"]))
    with pytest.warns(hookrun.HookrunWarning):
        assert hookrun.sweep(overrides=[f"resume={runs.folder}"]).folder == runs.folder


# ---- the name -------------------------------------------------------------------------------------------------------


def test_the_folder_and_the_function_have_one_name() -> None:
    import hookrun.run.execute

    assert hookrun.run is sys.modules["hookrun.run"]
    assert hookrun.run.execute.STOPPED == 3
    assert inspect.signature(hookrun.run) == inspect.signature(in_process.run)
    shown = pydoc.plain(pydoc.render_doc(hookrun.run))
    assert "experiment: its name" in shown
    assert "from what it names to its finished directory" in shown


@pytest.mark.parametrize("first", ["", "import hookrun.run.ranks", "from hookrun import run"])
def test_it_is_called_whatever_came_first(first: str) -> None:
    call = "try:\n    hookrun.run(3)\nexcept hookrun.SpecError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\nimport hookrun\n{call}"], capture_output=True, text=True
    )
    assert "experiment: found 3, expected a name" in done.stdout, done.stderr


def test_the_import_of_hookrun_stays_small() -> None:
    program = (
        "import sys, hookrun; print(*sorted(name for name in sys.modules if name.startswith('hookrun')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["hookrun", "hookrun.version"]
