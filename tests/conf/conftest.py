"""Shipped experiments as runs, each once, and what the tutorials' hooks are in hand-written PyTorch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from made_once import made_once
from shipped_needs import EXPERIMENTS, copy_needed, needs_of
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.models import build
from hookrun.models.settings import Model
from hookrun.store.reader import Run

TUTORIALS = EXPERIMENTS / "tutorial"
SMALL = ("compute.threads=1", "compute.device=cpu", "strict=true")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def clamped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where lm/neuron_clamp and before it lm/names_model ended without a warning or a word on stderr; only read."""

    def train(folder: Path) -> None:
        few = ("task.max_new_tokens=5", "data.batch_size=4", "vars.value=40")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
                assert main(["experiment=lm/neuron_clamp", *SMALL, *few]) == 0
        assert "WARNING" not in out.getvalue()
        assert err.getvalue() == ""

    return made_once(tmp_path_factory, "trained", train)


@pytest.fixture
def names_model(clamped: Path, tmp_path: Path) -> None:
    """The model that several experiments need has been trained in the folder of the test."""
    shutil.copytree(clamped / "outputs/needs", tmp_path / "outputs/needs", dirs_exist_ok=True)


@pytest.fixture(scope="session")
def _needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that experiments needed so far in this process, as in outputs/needs."""
    return tmp_path_factory.mktemp("needed")


@pytest.fixture
def shipped(tmp_path: Path, request: pytest.FixtureRequest, capsys, pages: None) -> Callable[..., Run]:
    """Run an experiment: it ends well without a warning or a word on stderr, every hook fires, a page is drawn.

    What it needs runs once for the tests of this process.
    """
    before = request.getfixturevalue("_needed")
    here = tmp_path / "outputs/needs"

    def run(name: str, *overrides: str, code: int = 0) -> Run:
        if name.startswith("lm/"):
            request.getfixturevalue("names_model")
        needed = needs_of(name)
        copy_needed(before, here, needed)
        capsys.readouterr()
        assert main([f"experiment={name}", *SMALL, *overrides]) == code
        printed = capsys.readouterr()
        if code == 0:
            assert "WARNING" not in printed.out
            assert printed.err == ""
        print(printed.out, end="")
        print(printed.err, end="", file=sys.stderr)
        copy_needed(here, before, needed)
        return hookrun.open_run("outputs/latest")

    return run


@pytest.fixture
def tutorial(shipped: Callable[..., Run]) -> Callable[..., Run]:
    """Run the experiment of a row, as `shipped` does."""

    def run(row: int, *overrides: str) -> Run:
        (found,) = [file.stem for file in TUTORIALS.glob(f"{row:02}_*.yaml")]
        return shipped(f"tutorial/{found}", *overrides)

    return run


@pytest.fixture
def under_hooks() -> Callable[..., tuple[nn.Module, Any]]:
    """Makes one forward and backward of a row's model under its hooks, which all fire: the model and the hooks."""

    def under_hooks(
        row: int, *overrides: str, inputs: tuple[Any, ...] = (), name: str = ""
    ) -> tuple[nn.Module, Any]:
        (found,) = [file.stem for file in TUTORIALS.glob(f"{row:02}_{name}*.yaml")]
        own: Any = {"experiment": f"tutorial/{found}", "overrides": ["compute.device=cpu", *overrides]}
        model, _ = hookrun.build(**own)
        with hookrun.hooked(model, hookrun.load_spec(**own), strict=True) as hooks:
            model(*inputs).mean().backward()
        return model, hooks

    return under_hooks


@pytest.fixture
def in_memory(under_hooks: Callable[..., tuple[nn.Module, Any]]) -> Callable[..., tuple[nn.Module, Any]]:
    """As `under_hooks`: the model, and what the hooks captured."""

    def in_memory(row: int, *overrides: str, inputs: tuple[Any, ...] = ()) -> tuple[nn.Module, Any]:
        model, hooks = under_hooks(row, *overrides, inputs=inputs)
        return model, hooks.captures

    return in_memory


@pytest.fixture
def model_of() -> Callable[..., nn.Module]:
    """Makes the model of a row, as the run makes it."""

    def model_of(name: str, seed: int = 0, sample_shape: tuple[int, ...] = (1, 8, 8)) -> nn.Module:
        torch.manual_seed(seed)
        return build(Model(name=name), sample_shape=sample_shape, num_classes=10, trust=frozenset())

    return model_of


@pytest.fixture
def on_gradient() -> Callable[..., None]:
    """Puts a tensor hook on a module's output, by hand."""

    def on_gradient(module: nn.Module, hook: Callable[[Tensor], Any]) -> None:
        def attach(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(hook)

        module.register_forward_hook(attach)

    return on_gradient


@pytest.fixture
def outputs_of() -> Callable[..., dict[str, Tensor]]:
    """What the named modules return for batches in evaluation mode, by forward hooks by hand."""

    def outputs_of(model: nn.Module, names: list[str], batches: list[Tensor]) -> dict[str, Tensor]:
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output, name=name: kept[name].append(output)
            )
        with torch.no_grad():
            model.eval()
            for batch in batches:
                model(batch)
        return {name: torch.cat(rows) for name, rows in kept.items()}

    return outputs_of
