"""What public objects show in a notebook and at the prompt: bounded, escaped, and with the names that users need."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

import hookrun
from hookrun.store.runs import runs
from hookrun.studies.effects.records import Effects, write_effects

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 10_000
HOOKS = {
    "seen": {"select": "0", "hook": "forward", "action": "capture"},
    "small": {"select": "*", "hook": "grad", "action": "clamp", "max": 0.5},
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def recorded(path: Path) -> hookrun.Recording:
    """A finished run of the net, with captures, metrics and effects, and with hostile names in its files."""
    model = net()
    with hookrun.record(model, HOOKS, path) as hooks:
        for step in range(3):
            loss = model(torch.ones(5, 3)).sum()
            loss.backward()
            hooks.log(loss=loss, step=step)
    axes = {"module": [HOSTILE[:900], "fc"], "head": [0, 1]}
    tensors = {"exact": torch.tensor([[0.5, 0.25], [0.5, torch.nan]]), "unedited": torch.tensor(0.5)}
    write_effects(path, Effects(tensors, axes, [], {"hook": HOSTILE[:900], "metric": "loss"}))
    return hooks


@pytest.fixture
def shown(tmp_path: Path, no_pages: None) -> dict[str, Any]:
    """Every kind of object that is shown."""
    model = net()
    plan = hookrun.compile(HOOKS, model, example=((torch.ones(2, 3),), {}))
    hooks = recorded(tmp_path / "run")
    run = hookrun.open_run(tmp_path / "run")
    return {
        "spec": hookrun.load_spec({"hooks": HOOKS}),
        "plan": plan,
        "installation": plan.install(model),
        "recording": hooks,
        "run": run,
        "runs": runs(tmp_path),
        "capture": run.captures["seen"]["0"],
        "comparison": run.compare(run),
        "effects": run.effects,
        "modules": hookrun.modules(model, ((torch.ones(2, 3),), {}), "type:Linear"),
    }


KINDS = (
    *("spec", "plan", "installation", "recording", "run", "runs", "capture"),
    *("comparison", "effects", "modules"),
)


NEEDED = {
    "spec": ["hooks", "seed"],
    "plan": ["hash", "hooks", "install"],
    "installation": ["captures", "fired", "records"],
    "recording": ["captures", "log", "path"],
    "run": ["captures", "effects", "plot", "show", "table"],
    "runs": ["table", "where"],
    "capture": ["hook", "plot", "shape"],
    "comparison": ["captures", "first", "reasons"],
    "effects": ["axes", "plot"],
    "modules": ["table"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_repr_has_at_most_five_lines(kind: str, shown: dict[str, Any]) -> None:
    assert len(repr(shown[kind]).splitlines()) <= 5
    assert len(repr(shown[kind])) < 1_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_no_script_address_or_colour(kind: str, shown: dict[str, Any]) -> None:
    page = shown[kind]._repr_html_()
    assert page.startswith("<div") and page.endswith("</div>")
    assert not re.search(r"<script|<img|href|src=|url\(|background|color:(?!inherit)", page)
    assert not re.search("[\x00-\x1f\u202e]", page)
    assert len(page) < 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_dir_has_only_what_users_need(kind: str, shown: dict[str, Any]) -> None:
    names = dir(shown[kind])
    assert names
    assert [name for name in names if name.startswith(("_", "model_"))] == []
    assert set(names).isdisjoint(dir(BaseModel))
    assert {*NEEDED[kind]} <= set(names)


def test_dir_of_the_keys_of_a_hook_is_its_keys(shown: dict[str, Any]) -> None:
    keys = shown["spec"].hooks[0].keys
    assert dir(keys) == sorted(type(keys).model_fields)


def test_a_plan_of_5000_modules_shows_20() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(5_000)])
    spec = {"all": {"select": "type:Identity", "hook": "forward", "action": "print"}}
    plan = hookrun.compile(spec, model)
    page = plan._repr_html_()
    assert page.count("<td ") == 20 * 9
    assert ">and 4,980 more<" in page
    assert len(page) < 30_000
    assert repr(plan).splitlines()[0] == f"<plan {plan.hash[:12]}: 1 hook on Sequential>"
    assert repr(plan).splitlines()[-1] == "  and 4,997 more"


def test_each_hook_of_a_plan_is_in_its_table() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(50)])
    wide = {"select": "type:Identity", "hook": "forward", "action": "print"}
    none = {"select": "nothing", "hook": "forward", "action": "print", "expect": "0..1"}
    plan = hookrun.compile({"one": {**wide, "select": "3"}, "wide": wide, "none": none}, model)
    texts = re.findall(r"<td [^>]*>([^<]*)</td>", plan._repr_html_())
    assert [text for text in texts if text in ("one", "wide", "none")] == ["one", "wide", "none"]


def test_print_of_a_plan_stays_the_whole_table(shown: dict[str, Any]) -> None:
    lines = str(shown["plan"]).splitlines()
    assert lines[0].split() == [
        "#",
        "hook",
        "modules",
        "class",
        "hook",
        "type",
        "action",
        "parameters",
        "when",
        "shape",
    ]
    assert lines[-1] == f"plan {shown['plan'].hash[:12]}"


def test_a_spec_shows_what_was_written(shown: dict[str, Any]) -> None:
    assert repr(shown["spec"]).splitlines() == [
        "<spec: 2 hooks, seed 0>",
        "  seen  0  forward  capture  always",
        "  small  *  grad  clamp  max=0.5  always",
    ]
    assert repr(shown["spec"].hooks) == "(seen: forward capture on 0, small: grad clamp on *)"


def test_a_damaged_run_is_shown_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    run = hookrun.Run(tmp_path)
    assert repr(run) == f"<run {tmp_path}: damaged>"
    assert "status.json is not JSON" in run._repr_html_()


def test_an_installation_counts_how_often_hooks_fired() -> None:
    model = net()
    hooks = hookrun.hooked(model, {"seen": HOOKS["seen"]})
    assert "not installed" in repr(hooks)
    with hooks:
        model(torch.ones(1, 3))
        model(torch.ones(1, 3))
        assert repr(hooks).splitlines()[1] == "  seen  0  forward  capture  2"
        assert "1 site, installed" in hooks._repr_html_()
    assert "1 site, removed" in repr(hooks)


def test_a_damaged_run_is_still_a_row_of_runs(tmp_path: Path, no_pages: None) -> None:
    recorded(tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    page = runs(tmp_path)._repr_html_()
    assert re.findall(r">(broken|whole|damaged|done)</td>", page) == ["broken", "damaged", "whole", "done"]


def test_effects_show_the_largest_change_first(tmp_path: Path) -> None:
    tensors = {"exact": torch.tensor([0.5, 0.25, 0.75, torch.nan, 1.5]), "unedited": torch.tensor(0.5)}
    effects = Effects(tensors, {"module": list("abcde")}, [], {"hook": "h", "metric": "loss"})
    assert re.findall(r"<td [^>]*>([a-e])</td>", effects._repr_html_()) == ["e", "b", "c", "a"]


def test_a_comparison_names_captures_and_metrics(shown: dict[str, Any]) -> None:
    comparison = shown["comparison"]
    assert repr(comparison).splitlines()[1].split() == ["seen", "at", "0", "0", "0", "false"]
    of_metrics = repr(comparison.model_copy(update={"captures": []})).splitlines()
    assert of_metrics[-1].endswith("more") or len(of_metrics) == 1 + len(comparison.metrics)
    assert of_metrics[1].split()[0] == comparison.metrics[0]["key"]


def test_equal_runs_say_that_nothing_differs(shown: dict[str, Any]) -> None:
    comparison = shown["comparison"]
    assert repr(comparison).splitlines()[0].endswith(": nothing differs>")
    assert str(comparison) == repr(comparison)


def test_a_capture_shows_its_first_rows(shown: dict[str, Any]) -> None:
    capture = shown["capture"]
    cells = re.findall(r"<td [^>]*>([^<]*)</td>", capture._repr_html_())
    numbers = [float(text) for text in cells[1].split()]
    assert numbers == pytest.approx(capture[0].tolist(), rel=1e-3)
    assert f"and {len(capture) - 5} more" in capture._repr_html_()


def test_mappings_complete_their_keys(shown: dict[str, Any]) -> None:
    run = shown["run"]
    assert run.captures._ipython_key_completions_() == ["seen"]
    assert run.captures["seen"]._ipython_key_completions_() == ["0"]
    assert run.effects._ipython_key_completions_() == ["exact", "unedited"]
    assert shown["modules"]._ipython_key_completions_() == ["", "0", "1", "2"]
    model = net()
    with hookrun.hooked(model, {"seen": HOOKS["seen"]}) as hooks:
        model(torch.ones(1, 3))
    assert hooks.captures["seen"]._ipython_key_completions_() == ["0"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ('run.captures["', ["seen"]),
        ('run.captures["seen"]["', ["0"]),
        ('run.captures["seen"]["0"].pl', ["plot"]),
        ('run.effects["', ["exact", "unedited"]),
        ("run.sh", ["show"]),
    ],
)
def test_a_prompt_completes_what_is_not_read_yet(typed: str, names: list[str], shown: dict[str, Any]) -> None:
    completer = pytest.importorskip("IPython.core.completer")
    of_run = completer.IPCompleter(namespace={"run": shown["run"]}, use_jedi=False)
    with completer.provisionalcompleter():
        found = [each.text for each in of_run.completions(typed, len(typed))]
    assert [name.strip('."]') for name in found] == names


class TestShow:
    def test_a_script_gets_the_path_of_the_page(
        self, tmp_path: Path, pages: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recorded(tmp_path / "run")
        capsys.readouterr()
        hookrun.open_run(tmp_path / "run").show()
        assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"

    def test_a_run_without_a_page_gets_one(
        self, tmp_path: Path, pages: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recorded(tmp_path / "run")
        page = tmp_path / "run" / "report.html"
        page.unlink()
        hookrun.open_run(tmp_path / "run").show()
        assert page.read_text().startswith("<!doctype html>")

    def test_a_notebook_gets_the_page_in_a_frame(
        self, tmp_path: Path, no_pages: None, in_a_kernel: list[dict[str, str]]
    ) -> None:
        recorded(tmp_path / "run")
        (tmp_path / "run" / "report.html").write_text('<p title="a">mine</p><script>1</script>')
        hookrun.open_run(tmp_path / "run").show()
        [data] = in_a_kernel
        frame = re.fullmatch(
            r'<iframe sandbox="allow-scripts" style="[^"]*" srcdoc="([^"]*)"></iframe>', data["text/html"]
        )
        assert frame is not None and "<" not in frame[1]
        assert "default-src &#x27;none&#x27;" in frame[1]
        assert frame[1].endswith("&lt;p title=&quot;a&quot;&gt;mine&lt;/p&gt;&lt;script&gt;1&lt;/script&gt;")

    def test_a_page_that_is_a_link_is_not_read(
        self, tmp_path: Path, no_pages: None, in_a_kernel: list[dict[str, str]]
    ) -> None:
        recorded(tmp_path / "run")
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "run" / "report.html").unlink()
        (tmp_path / "run" / "report.html").symlink_to(tmp_path / "secret")
        with pytest.raises(hookrun.HookrunError, match="link"):
            hookrun.open_run(tmp_path / "run").show()
        assert in_a_kernel == []


@pytest.fixture
def in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What a notebook's kernel was asked to show."""
    published = list[dict[str, str]]()
    publish: Callable[[dict[str, str]], None] = published.append
    shell = SimpleNamespace(kernel=object(), display_pub=SimpleNamespace(publish=publish))
    monkeypatch.setitem(__import__("sys").modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return published
