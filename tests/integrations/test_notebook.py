"""The documentation's notebook, executed in a kernel of this Python."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hookrun

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PAGE = Path(__file__).parents[2] / "hookrun" / "integrations" / "README.md"
CELLS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").split("# In your own loop")[0], re.DOTALL
)
KERNEL = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "here",
}


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[dict[str, Any]]]]:
    """Executes cells in a fresh kernel in an empty folder; returns the outputs of each."""
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    spec = tmp_path / "JUPYTER_DATA_DIR" / "kernels" / "here" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(KERNEL))
    folder = tmp_path / "notebook"
    folder.mkdir()

    def executed(*cells: str) -> list[list[dict[str, Any]]]:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = nbclient.NotebookClient(
            notebook,
            kernel_name="here",
            timeout=300,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute()
        return [cell.outputs for cell in notebook.cells]

    return executed


def text_of(output: dict[str, Any]) -> str:
    return output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]


def test_the_page_is_executed_as_it_is(executed: Any, tmp_path: Path) -> None:
    first, swept, own = executed(*CELLS)
    run, *_, last = hookrun.runs(tmp_path / "notebook").sorted("started")
    assert [run.status["status"], last.status["status"]] == ["done", "done"]
    printed, bar = map(text_of, first)
    assert "clip_fc   fc.weight" in printed
    assert "validation" in bar
    assert len(bar.splitlines()) == 1
    assert "loss" not in bar, "its numbers were those of one batch"
    assert f"done val {run.metrics[-1]['accuracy']:.0%}" in printed
    assert [output["output_type"] for output in swept] == ["stream", "display_data", "execute_result"]
    assert "hooked=false" in text_of(swept[0])
    assert text_of(own[-1]) == repr(last.captures["seen"]["1"][0:3])
    assert "\\u001b" not in json.dumps([first, swept, own])


def test_a_command_of_a_cell_writes_no_codes(executed: Any) -> None:
    command = f"{sys.executable} -m hookrun experiment=clip_fc train.epochs=1 train.limit_batches=3"
    of_a_pipe = f"import subprocess\nprint(subprocess.run({command.split()}, capture_output=True, text=True))"
    quiet = 'import hookrun\nhookrun.run("clip_fc", ["train.epochs=1"], quiet=True).status["status"]'
    unset = "import os\nos.environ.pop('JPY_PARENT_PID')"  # only some front ends set it
    _, typed, piped, alone = executed(unset, f"!{command} 2>&1", of_a_pipe, quiet)
    assert "run directory" in text_of(typed[0])
    assert "run directory" in text_of(piped[0])
    moves = re.compile(r"(\x1b|\\x1b)\[[0-9;?]*[A-HJKhl]|\r(?!\n)")
    assert moves.findall(text_of(typed[0]) + text_of(piped[0])) == []
    assert [text_of(output) for output in alone] == ["'done'"]


NET = """
import hookrun, torch
from torch import nn
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
hooks = {"seen": {"select": "*", "hook": "forward", "action": "capture"}}
with hookrun.record(net, hooks, "run"):
    net(torch.ones(2, 3))
run = hookrun.open_run("run")
"""


def test_print_writes_the_same_text_as_a_script(executed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = "print(hookrun.compile(hooks, net), hookrun.modules(net), sep='\\n')"
    *_, [output] = executed(NET, printed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    hooks = {"seen": {"select": "*", "hook": "forward", "action": "capture"}}
    print(hookrun.compile(hooks, model), hookrun.modules(model), sep="\n")
    assert text_of(output) == capsys.readouterr().out
