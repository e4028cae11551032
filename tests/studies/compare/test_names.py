"""Two implementations: `names` pairs their modules, `transpose` orders the dimensions of the other one's values."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draws import normal
from run_files import written
from torch import Tensor, nn

import hookrun
from hookrun.compare import main as compare
from hookrun.errors import SpecError
from hookrun.store.reader import Run

NAMES = {"model.layers.*.mlp": "blocks.*.ffn", "model.norm": "ln_f"}
Z = [0, 2, 1, 3]


class Heads(nn.Module):
    """x [rows, 24] -> [rows, tokens, heads, width], or with heads before tokens."""

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.heads_first = heads_first

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(len(x), 4, 2, 3)
        return z.transpose(1, 2).contiguous() if self.heads_first else z


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def implementation() -> nn.Sequential:
    layers = nn.Sequential(*(chain(mlp=nn.Linear(24, 24)) for _ in range(3)))
    return chain(model=chain(layers=layers, norm=nn.LayerNorm(24)), z=Heads(False))


def other_implementation() -> nn.Sequential:
    blocks = nn.Sequential(*(chain(ffn=nn.Linear(24, 24)) for _ in range(3)))
    return chain(blocks=blocks, ln_f=nn.LayerNorm(24), z=Heads(True))


def recorded(model: nn.Module, path: Path) -> Run:
    spec = {
        "seen": {"select": {"path": "**", "leaf": True}, "hook": "forward", "action": "capture"},
        "size": {"select": "type:Linear", "hook": "forward", "action": "stats"},
    }
    with torch.no_grad(), hookrun.record(model, spec, run_dir=path):
        model(normal(6, 24))
    return hookrun.open_run(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, Run]:
    """A model, the same one under other names, and that with a larger weight in its second layer."""
    folder = tmp_path_factory.mktemp("implementations")
    model = implementation()
    other = other_implementation()
    weights = model.state_dict().values()
    other.load_state_dict(dict(zip(other.state_dict(), weights, strict=True)))
    one = recorded(model, folder / "one")
    same = recorded(other, folder / "same")
    with torch.no_grad():
        other.get_parameter("blocks.1.ffn.weight")[3, 4] += 1
    return one, same, recorded(other, folder / "faulty")


def test_globs_pair_two_implementations(runs: tuple[Run, Run, Run]) -> None:
    one, same, _ = runs
    found = one.compare(same, names=NAMES, transpose={"z": Z}, tolerance=1e-6)
    assert found.reasons == []
    assert [row["module"] for row in found.captures] == [
        *("model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp", "model.norm", "z"),
    ]
    pairs = [(row["module"], row["other"], row["transpose"]) for row in found.names]
    assert pairs == [
        ("model.layers.0.mlp", "blocks.0.ffn", None),
        ("model.layers.1.mlp", "blocks.1.ffn", None),
        ("model.layers.2.mlp", "blocks.2.ffn", None),
        ("model.norm", "ln_f", None),
        ("z", "z", Z),
    ]
    alternatives = {"model.layers.{0,1,2}.mlp": "blocks.{0,1,2}.ffn", "{model.norm,z}": "{ln_f,z}"}
    assert one.compare(same, names=alternatives, transpose={"?": Z}).names == found.names


def test_the_first_difference_has_both_names(runs: tuple[Run, Run, Run]) -> None:
    one, _, faulty = runs
    found = one.compare(faulty, names=NAMES, transpose={"z": Z})
    assert found.first == {"module": "model.layers.1.mlp", "sample": 0, "token": None}
    assert found.reasons[0] == "first: model.layers.1.mlp (blocks.1.ffn in the other run), sample 0"
    apart = [row["module"] for row in found.captures if row["differs"]]
    assert apart == ["model.layers.1.mlp", "model.layers.2.mlp", "model.norm", "z"]
    places = {row["key"].partition(" action")[0] for row in found.statistics}
    assert places == {f"hook size module {module}" for module in apart[:2]}


def test_the_others_dimensions_are_put_in_order(runs: tuple[Run, Run, Run]) -> None:
    one, _, faulty = runs
    rows = one.compare(faulty, names=NAMES, transpose={"z": Z}).captures
    z = one.captures["seen"]["z"].numpy()
    other = faulty.captures["seen"]["z"].numpy().transpose(Z)
    apart = np.abs(z - other)
    assert rows[-1]["relative_l2"] == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(z))
    index = np.unravel_index(apart.argmax(), apart.shape)
    assert (rows[-1]["largest_sample"], rows[-1]["largest_index"]) == (
        index[0],
        " ".join(map(str, index[1:])),
    )


def test_what_has_no_partner_is_listed_and_not_judged(runs: tuple[Run, Run, Run]) -> None:
    one, same, _ = runs
    found = one.compare(same, names={"model.norm": "ln_f"}, transpose={"z": Z})
    assert found.reasons == []
    assert [row["module"] for row in found.captures] == ["model.norm", "z"]
    without = {(row["only"], row["module"]) for row in found.unpaired}
    assert without == {
        *(("run", f"model.layers.{layer}.mlp") for layer in range(3)),
        *(("other", f"blocks.{layer}.ffn") for layer in range(3)),
    }
    assert "only" in " ".join(one.compare(same).reasons)


class Pair(nn.Linear):
    """Returns a tuple, as the attention of transformers does."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_a_tensor_belongs_to_the_first_of_a_tuple(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules = chain(attn=Pair(4, 4)), chain(self_attn=nn.Linear(4, 4))
    modules[1].load_state_dict(
        dict(zip(modules[1].state_dict(), modules[0].state_dict().values(), strict=True))
    )
    runs = list[Run]()
    for module in modules:
        (name,) = dict(module.named_children())
        spec = {"seen": {"select": name, "hook": "forward", "action": "capture"}}
        with torch.no_grad(), hookrun.record(module, spec, run_dir=tmp_path / name):
            module(normal(3, 4))
        runs.append(hookrun.open_run(tmp_path / name))
    one, other = runs
    for found in (
        one.compare(other, names={"attn": "self_attn"}),
        other.compare(one, names={"self_attn": "attn"}),
    ):
        assert found.reasons == []
        (row,) = found.captures
        assert row["rows"] == 3
        assert [each["path"] for each in found.unpaired] == ["[1]"]
    with torch.no_grad():
        modules[1].get_parameter("self_attn.weight")[1, 2] += 1
    with torch.no_grad(), hookrun.record(modules[1], spec, run_dir=tmp_path / "faulty"):
        modules[1](normal(3, 4))
    found = one.compare(tmp_path / "faulty", names={"attn": "self_attn"})
    assert found.first == {"module": "attn", "sample": 0, "token": None}


def test_names_may_cross(tmp_path: Path) -> None:
    x, y, z = normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)
    one = written(tmp_path / "one", {"a": x, "b": y, "c": z})
    other = written(tmp_path / "other", {"a": y, "b": x, "c": z})
    assert one.compare(other, names={"a": "b", "b": "a"}).reasons == []
    crossed = one.compare(other, names={"a": "b"})
    assert [row["module"] for row in crossed.captures] == ["a", "c"]
    assert [(row["only"], row["module"]) for row in crossed.unpaired] == [("run", "b"), ("other", "a")]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"model.layers.*.mlp": "blocks.*.fnn"}, "did you mean 'blocks."),
        ({"model.layers.*.mpl": "blocks.*.ffn"}, "matches no module of"),
        ({"model.layers.*.mlp": "blocks.0.ffn"}, "both need the same wildcards in the same order"),
        ({"model.layers.*.mlp": "blocks.**.ffn"}, "both need the same wildcards in the same order"),
        ({"model.layers.{0,1}.mlp": "blocks.{0,1,2}.ffn"}, "as many alternatives in braces"),
        ({"model.layers.{0,1,3}.mlp": "blocks.{0,1,2}.ffn"}, "'model.layers.3.mlp' matches no module"),
        ({"model.*.*.mlp": "*.*.ffn"}, "which is missing in"),
        ({"model.layers.?.m*p*": "blocks.?.f*n*"}, "it is open what each stands for"),
        ({"**.layers.**": "**.blocks.**"}, "it is open what each stands for"),
        ({"model.layers[0].mlp": "blocks.0.ffn"}, "an index counts modules"),
        (
            {"model.layers.*.mlp": "blocks.*.ffn", "model.layers.0.mlp": "blocks.1.ffn"},
            "leave one of them out",
        ),
        ({"model.layers.*.mlp": "blocks.*.ffn", "model.norm": "blocks.1.ffn"}, "leave one of them out"),
        ({"model.layers.{0,1}.mlp": "blocks.{0,0}.ffn"}, "leave one of them out"),
        ({"re:model.norm": "ln_f"}, "expected a name or a glob"),
        ({"model.{norm": "ln_f"}, "a { without its }"),
        ({"model.norm": ["ln_f"]}, "expected a valid string"),
        ({True: "ln_f"}, "YAML reads on and yes as true"),
        (["model.norm"], "expected a mapping"),
    ],
)
def test_names_that_do_not_fit_are_refused(runs: tuple[Run, Run, Run], names: Any, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        runs[0].compare(runs[1], names=names, transpose={"z": Z})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("transpose", "said"),
    [
        ({"z": [0, 1, 3, 2]}, "does not make rows of [4, 2, 3] from those of [2, 4, 3]"),
        ({"z": [0, 2, 1]}, "does not make rows of [4, 2, 3]"),
        ({"z": [2, 0, 1, 3]}, "0 is the rows"),
        ({"z": [0, 2, 2, 3]}, "name each dimension"),
        ({"z": "0213"}, "expected a valid list"),
        ({"model.norm": [0, 1]}, "matches no module of"),
        ({"z": Z, "?": Z}, "or one that another entry matches"),
    ],
)
def test_orders_that_do_not_fit_are_refused(runs: tuple[Run, Run, Run], transpose: Any, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        runs[0].compare(runs[1], names=NAMES, transpose=transpose)
    assert said in str(refused.value)


def test_the_command_exits_by_a_typed_tolerance(runs: tuple[Run, Run, Run], capsys: Any) -> None:
    one, same, faulty = (str(run.path) for run in runs)
    Path("names.yaml").write_text(yaml.safe_dump({"names": NAMES, "transpose": {"z": Z}}))
    named = ["--names", "names.yaml"]
    assert compare([one, same, *named, "--tolerance", "1e-6"]) == 0
    assert "paired: z and z, its dimensions in the order [0, 2, 1, 3]" in capsys.readouterr().out
    assert compare([*named, one, faulty]) == 0
    assert compare(["--tolerance=1e-3", one, faulty, *named]) == 3
    assert compare([one, faulty, *named, "task.tolerance=0.001"]) == 3
    assert compare([one, faulty, *named, "--tolerance", "1e-3", "task.on_difference=report"]) == 0
    assert compare([one, same, "--tolerance", "much"]) == 2
    capsys.readouterr()
    assert compare([one, same, "--tolerance", "1", "task.tolerance=2"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
    assert compare([one, same, "--help"]) == 0
    assert "--names FILE" in capsys.readouterr().out


def test_the_page_has_the_pairs(runs: tuple[Run, Run, Run], pages: None) -> None:
    Path("names.yaml").write_text(yaml.safe_dump(NAMES))
    typed = "task.transpose={z: [0, 2, 1, 3]}"
    assert compare([str(runs[0].path), str(runs[2].path), "--names", "names.yaml", typed]) == 0
    page = Path("outputs/latest/report.html").read_text()
    assert "blocks.1.ffn in the other run" in page
    assert "ln_f" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- model.norm", "expected a mapping"),
        ("3", "names.yaml"),
        ("", "at least 1 item"),
        ("names: {model.norm: ln_f}\nname: {z: z}", "names.yaml.name: unknown key"),
        ("names: 3\ntranspose: {z: [0, 2, 1, 3]}", "expected a mapping"),
        ("model.norm: ln_f\nmodel.norm: z", "found duplicate key"),
        ("model.norm: ${oc.env:HOME}", "matches no module"),
        ("model.norm: !!python/object:os.system x", "names.yaml"),
        (f"{'a: &a [' + 'x,' * 90 + ']'}\nb: [{'*a,' * 200}]", "10,000 values"),
    ],
)
def test_a_strangers_file_of_names_is_refused(
    runs: tuple[Run, Run, Run], text: str, said: str, capsys: Any
) -> None:
    Path("names.yaml").write_text(text)
    assert compare([str(runs[0].path), str(runs[1].path), "--names", "names.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_sweeps_are_compared_with_names(runs: tuple[Run, Run, Run], capsys: Any) -> None:
    for sweep, jobs in (("a", (runs[0], runs[0])), ("b", (runs[1], runs[2]))):
        for number, job in enumerate(jobs):
            shutil.copytree(job.path, Path(sweep, str(number)))
        Path(sweep, "multirun.yaml").touch()
    Path("names.yaml").write_text(yaml.safe_dump({"names": NAMES, "transpose": {"z": Z}}))
    assert compare(["a", "b", "--names", "names.yaml", "--tolerance", "1e-3"]) == 3
    assert "1: first: model.layers.1.mlp (blocks.1.ffn" in capsys.readouterr().out
