"""`Run.plot`, `StoredCapture.plot`, `Effects.plot`: the pictures of the page as one SVG by itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree
from pathlib import Path

import numpy as np
import pytest
import torch

import hookrun
from hookrun.report.draw.charts import Figure, Series, bars, histogram, lines
from hookrun.report.draw.pictures import HeatMap, mosaic
from hookrun.report.draw.plot import Plot
from hookrun.report.draw.ridge import Histogram, ridge
from hookrun.store.run_dir import RunDir
from hookrun.studies.effects.records import Effects, write_effects

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert(1)</script> & "quoted" \x1b[31m\u202e' + "x" * 200


def finished(path: Path, **captured: torch.Tensor) -> hookrun.Run:
    """A run with two metrics, and with captures of these rows."""
    run = RunDir.create(path)
    for step in range(4):
        run.log_metrics(split="train", epoch=0, step=step, loss=1.0 / (step + 1), accuracy=0.25 * step)
    for module, rows in captured.items():
        ids = range(len(rows))
        run.captures.add("seen", module, rows, epoch=0, step=0, call=0, split="val", sample_ids=ids)
    run.close()
    run.write_manifest()
    run.set_status("done")
    return hookrun.open_run(path)


def texts(plot: Plot) -> list[str]:
    """The texts in its SVG."""
    return [text.text or "" for text in tree.fromstring(plot._repr_svg_()).iter(f"{SVG}text")]


def test_a_metric_is_the_chart_of_the_page(tmp_path: Path) -> None:
    plot = finished(tmp_path / "run").plot("loss")
    steps = list(range(4))
    expected = lines("loss", [Series("train", steps, [1.0, 1 / 2, 1 / 3, 1 / 4])], x="step", y="loss")
    [path] = re.findall(r'<path class="line c0" d="([^"]*)"', plot._repr_svg_())
    assert path in expected.picture
    assert "loss" in texts(plot)
    assert repr(plot).startswith("<plot of loss: 1 picture")


def test_a_histogram_of_a_hook_is_the_ridge_of_the_page(tmp_path: Path) -> None:
    hook = {"select": "0", "hook": "forward", "action": "stats", "of": {"histogram": {"bins": 4}}}
    model = torch.nn.Sequential(torch.nn.Identity())
    batches = torch.randn(3, 50)
    with hookrun.record(model, {"seen": hook}, run_dir=tmp_path / "run") as hooks:
        for batch in batches:
            model(batch)
            hooks.step()
    plot = hookrun.open_run(tmp_path / "run").plot("seen")
    expected = dict[float, Histogram]()
    for step, batch in enumerate(batches):
        counts = torch.histc(batch, 4).int().tolist()
        edges = torch.linspace(batch.min().item(), batch.max().item(), 5).tolist()
        expected[step] = {"counts": counts, "edges": edges}
    [figure] = plot.figures
    assert figure.picture == ridge(figure.title, expected, "step").picture
    assert "histogram of 0" in figure.title
    with pytest.raises(hookrun.HookrunError, match="no metric 'sen' over steps: did you mean 'seen'"):
        hookrun.open_run(tmp_path / "run").plot("sen")


@pytest.mark.parametrize(
    ("name", "near"), [("lss", "did you mean 'loss'"), ("zzz", "there are: accuracy, loss")]
)
def test_an_unknown_metric_names_those_that_exist(name: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(hookrun.HookrunError, match=f"no metric '{name}'.*{near}"):
        finished(tmp_path / "run").plot(name)


@pytest.mark.parametrize("shape", [(6, 5), (6, 300), (6, 4, 4), (6, 3, 8, 8), (6,)])
def test_a_capture_of_any_shape_is_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = finished(tmp_path / "run", layer=torch.rand(shape))
    plot = run.captures["seen"]["layer"].plot()
    page = tree.fromstring(plot._repr_svg_())
    assert "distribution" in texts(plot)
    assert len(plot.figures) == len(page.findall(f"./{SVG}g"))


def test_a_capture_that_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", nans=torch.full((3, 2), torch.nan), one=torch.ones(1))
    with pytest.raises(hookrun.HookrunError, match="can't be drawn: none of its values is finite"):
        run.captures["seen"]["nans"].plot()
    with pytest.raises(hookrun.HookrunError, match="can't be drawn: it has a single value, 1"):
        run.captures["seen"]["one"].plot()


def test_effects_are_the_maps_of_the_page(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    tensors = {"exact": torch.tensor([[0.5, 0.25], [0.5, 1.0]]), "unedited": torch.tensor(0.5)}
    axes = {"module": ["conv", "fc"], "head": [0, 1]}
    write_effects(run.path, Effects(tensors, axes, [], {"hook": "ablate", "metric": "loss"}))
    plot = run.effects.plot()
    assert {"conv", "fc", "0", "1"} <= set(texts(plot))
    assert "<image" in plot._repr_svg_()
    assert repr(plot).startswith("<plot of the effects of ablate: 1 picture")


def test_effects_without_a_run_are_not_drawn() -> None:
    effects = Effects({"exact": torch.ones(1), "unedited": torch.tensor(0.5)}, {"module": ["a"]}, [], {})
    with pytest.raises(hookrun.HookrunError, match="were not read from a run"):
        effects.plot()


def figures(name: str) -> list[Figure]:
    """A figure of each kind with this name wherever a name can be."""
    return [
        lines(name, [Series(name, [0, 1], [1, 2]), Series("b", [0, 1], [2, 1])], x=name, y=name, note=name),
        bars(name, [1.0, 2.0], x=name, y=name, names=[name, "b"], note=name),
        histogram(name, [1, 2], [0, 1, 2], note=name),
        HeatMap(
            name, np.eye(2), rows=[name, "b"], columns=[name, "b"], x=name, note=name, facts=[name]
        ).figure(),
        HeatMap(name, np.eye(2), rows=[name, "b"], columns=["a", "b"], x=name, numbers=True).figure(),
        mosaic(
            name, np.random.default_rng(0).random((2, 3, 4, 4)), rows=[name, "b"], columns=name, note=name
        ),
    ]


def test_a_hostile_name_adds_no_element_or_attribute() -> None:
    def names(plot: Plot) -> set[str]:
        found = set[str]()
        for element in tree.fromstring(plot._repr_svg_()).iter():
            found |= {element.tag, *element.attrib}
        return found

    assert names(Plot("plot", figures(HOSTILE))) == names(Plot("plot", figures("plain")))


def test_nothing_is_loaded_and_no_script_runs() -> None:
    page = Plot("plot", figures("plain"))._repr_svg_()
    addresses = re.findall(r'href="([^"]{0,22})', page)
    assert addresses and set(addresses) == {"data:image/png;base64,"}
    assert not re.search(r"<script|@import|url\(|\son\w+=", page)
    assert "data-hover" not in page


def test_a_notebook_gets_the_colour_of_its_text() -> None:
    plot = Plot("plot", figures("plain"))
    alone = tree.fromstring(plot._repr_svg_())
    inline = tree.fromstring(plot._repr_html_())
    assert alone.attrib.pop("color") == "#7a828c"
    assert alone.attrib == inline.attrib
    assert ".hookrun-plot text { font-size: 11px; fill: currentColor; }" in plot._repr_html_()


def test_every_class_that_is_drawn_has_a_rule() -> None:
    page = Plot("plot", figures("plain"))._repr_svg_()
    style = page[: page.index("</style>")]
    drawn = {name for names in re.findall(r'<path class="([^"]*)"', page) for name in names.split()}
    assert drawn and all(f".{name}" in style for name in drawn)


def test_pictures_stand_below_each_other() -> None:
    page = tree.fromstring(Plot("plot", figures("plain"))._repr_svg_())
    end = 0.0
    for group in page.findall(f"./{SVG}g"):
        top = float(re.findall(r"translate\(0 ([\d.]+)\)", group.attrib["transform"])[0])
        assert top >= end
        end = top + float(group[0].attrib["height"])
    assert end <= float(page.attrib["height"])


def test_a_picture_of_texts_is_on_the_page_only() -> None:
    plot = Plot("plot", [*figures("plain"), Figure("tokens", figures("plain")[3].picture)])
    assert "on the page only: 1 picture of texts" in texts(plot)


def test_save_writes_the_svg_and_returns_its_path(tmp_path: Path) -> None:
    plot = Plot("plot", figures("plain"))
    path = plot.save(tmp_path / "loss.svg")
    assert path.read_text(encoding="utf-8") == plot._repr_svg_()
