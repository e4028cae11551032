"""Data that is no stack of equal tensors: lists, a user's own collate function, samples without a batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

import hookrun
from hookrun.cli import main
from hookrun.data import describe
from hookrun.data.settings import Data
from hookrun.errors import HookrunError
from hookrun.run.experiment.prepared import as_call
from hookrun.run.passes.batches import moved
from hookrun.store.format import SAMPLES
from hookrun.store.reader import Run

SOURCE = '''
import os
import signal
from dataclasses import dataclass

import torch
from torch import nn


class OfLength:
    length = {"train": 10, "val": 7}

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return self.length[self.split]


class Graphs(OfLength):
    """Rings of 3 to 6 nodes, as a mapping, with a label."""

    def __getitem__(self, index):
        if self.split == "train" and index == 9 and os.path.exists("stop"):
            os.remove("stop")
            os.kill(os.getpid(), signal.SIGTERM)
        nodes = 3 + index % 4
        drawn = torch.Generator().manual_seed(index)
        ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        return {"x": torch.randn(nodes, 5, generator=drawn), "edge_index": ring, "y": index % 3}


@dataclass
class Joined:
    x: torch.Tensor
    edge_index: torch.Tensor
    graph: torch.Tensor
    size: int


def join(graphs):
    sizes = torch.tensor([len(graph["x"]) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    edges = [graph["edge_index"] + start for graph, start in zip(graphs, starts)]
    joined = Joined(
        torch.cat([graph["x"] for graph in graphs]), torch.cat(edges, 1),
        torch.arange(len(graphs)).repeat_interleave(sizes), len(graphs),
    )
    return joined, torch.tensor([graph["y"] for graph in graphs])


def join_nodes(graphs):
    joined, labels = join(graphs)
    joined.size = 0
    return joined, labels[joined.graph]


def join_noisily(graphs):
    joined, labels = join(graphs)
    joined.x = joined.x + torch.randn(len(joined.x), 1)
    return joined, labels


def fails_late(graphs):
    assert all(len(graph["x"]) < 6 for graph in graphs), "a graph is too large"
    return join(graphs)


class GraphNet(nn.Module):
    """Scores of each graph, or of each node where the number of graphs is 0."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, graphs):
        nodes = self.inner(graphs.x)
        source, goal = graphs.edge_index
        nodes = torch.relu(nodes + torch.zeros_like(nodes).index_add(0, goal, nodes[source]))
        if graphs.size:
            nodes = torch.zeros(graphs.size, 8).index_add(0, graphs.graph, nodes)
        return self.outer(nodes)


class Clouds(OfLength):
    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4 + index % 5, 3, generator=drawn), index % 2


class CloudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, clouds):
        if isinstance(clouds, torch.Tensor):
            return self.outer(self.inner(clouds).amax(0))
        return self.outer(torch.stack([self.inner(cloud).amax(0) for cloud in clouds]))


class Scenes(OfLength):
    """Pictures of different sizes, and as many boxes as the index says."""

    def __getitem__(self, index):
        boxes = torch.arange(4.0 * (index % 3)).reshape(-1, 4)
        return torch.full((3, 8 + index, 9), index / 10), {"boxes": boxes, "labels": torch.ones(len(boxes))}


class Detector(nn.Module):
    """As torchvision's: losses while it trains, and else boxes for each picture."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, pictures, targets=None):
        boxes = [self.conv(picture).amax((1, 2)) for picture in pictures]
        if not self.training:
            return [{"boxes": found[None], "scores": found[:1]} for found in boxes]
        losses = [(found - target["boxes"]).abs().sum() for found, target in zip(boxes, targets)]
        return {"loss_box": torch.stack(losses).mean(), "loss_class": boxes[0].sum() * 0}


def with_targets(scenes):
    pictures, targets = [picture for picture, _ in scenes], [target for _, target in scenes]
    return (pictures, targets), targets


def total(output, targets):
    return sum(output.values()) if isinstance(output, dict) else torch.zeros(())


def boxes_wanted(output, targets):
    return sum(len(target["boxes"]) for target in targets) / len(targets)


@dataclass
class Ends:
    left: torch.Tensor
    right: torch.Tensor


class PairsOfEnds(OfLength):
    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return Ends(torch.randn(4, generator=drawn), torch.randn(4, generator=drawn)), index % 3


class EndsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(4, 3)

    def forward(self, ends):
        return self.outer(ends.left - ends.right)


class Ring:
    """An object of one's own that can be moved."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Ring(self.x.to(device))


class Rings(OfLength):
    def __getitem__(self, index):
        return Ring(torch.full((3 + index, 3), float(index))), index % 2


class RingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(3, 2)

    def forward(self, ring):
        return self.outer(ring.x.mean(0))


class Pairs(OfLength):
    """Two tensors of one size, for a model of two arguments."""

    def __getitem__(self, index):
        return (torch.full((3,), float(index)), torch.ones(2)), index % 2


class PairNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, one, other):
        return self.first(one) + self.second(other)


def raises(samples):
    return samples[0]["no such key"]


def number(samples):
    return 3


def none():
    return None
'''
GRAPHS = (
    "model=python", "model.factory=setpkg:GraphNet", "data=python", "data.factory=setpkg:Graphs", "data.batch_size=4",
)  # fmt: skip
CLOUDS = ("model=python", "model.factory=setpkg:CloudNet", "data=python", "data.factory=setpkg:Clouds")
SCENES = (
    "model=python", "model.factory=setpkg:Detector", "data=python", "data.factory=setpkg:Scenes", "data.batch_size=2",
)  # fmt: skip
CAPTURE = "+hooks.c={select: [inner, outer], hook: forward, action: capture}"
QUICK = ("train.epochs=2", "train.log_every=1", "train.optimizer={name: SGD, lr: 0.1}")


@pytest.fixture(autouse=True)
def _package(trusted: Callable[..., None]) -> None:
    trusted(setpkg=SOURCE)


def module() -> Any:
    return sys.modules["setpkg"]


def of_split(data: Any, collate: Callable[[list[Any]], Any], size: int) -> list[Any]:
    """The batches of a split in order, made by plain Python."""
    samples = [data[index] for index in range(len(data))]
    return [collate(samples[start : start + size]) for start in range(0, len(samples), size)]


def seeded(name: str) -> nn.Module:
    """The model as the run makes it."""
    model, _ = hookrun.build(overrides=["model=python", f"model.factory=setpkg:{name}", "data=digits"])
    return model


def lines_of(found: Run) -> list[dict[str, Any]]:
    """What samples.jsonl says of each sample."""
    return [json.loads(line) for line in (found.path / SAMPLES).read_text().splitlines()]


# ---- a function of one's own -----------------------------------------------------------------------------------------


def test_training_on_graphs_is_the_plain_loop(executed) -> None:
    found = executed(*GRAPHS, *QUICK, "data.collate=setpkg:join", "train.shuffle=false", CAPTURE)
    model = seeded("GraphNet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = [line for line in found.metrics if line.get("of") != "epoch" and line["split"] == "train"]
    expected = list[float]()
    for _ in range(2):
        for graphs, labels in of_split(module().Graphs("train"), module().join, 4):
            loss = cross_entropy(model(graphs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert [line["loss"] for line in lines] == pytest.approx(expected)
    batches = of_split(module().Graphs("val"), module().join, 4)
    losses = [cross_entropy(model(graphs), labels).item() * len(labels) for graphs, labels in batches]
    assert found.metrics[-1]["loss"] == pytest.approx(sum(losses) / 7)
    assert found.plan["code"]["data.collate"]["function"] == "setpkg:join"


def test_a_label_for_each_node_gives_means_over_nodes(executed) -> None:
    found = executed(*GRAPHS, "task=evaluate", "data.collate=setpkg:join_nodes")
    model, right, losses, nodes = seeded("GraphNet"), 0, 0.0, 0
    for graphs, labels in of_split(module().Graphs("val"), module().join_nodes, 4):
        scores = model(graphs)
        right += int((scores.argmax(1) == labels).sum())
        nodes += len(labels)
        losses += cross_entropy(scores, labels).item() * len(labels)
    assert found.metrics[-1]["accuracy"] == pytest.approx(right / nodes)
    assert found.metrics[-1]["loss"] == pytest.approx(losses / nodes)
    assert all("class" not in line for line in lines_of(found)), "a node has a label, a graph has none"


def test_labels_are_read_again_through_the_function(executed) -> None:
    found = executed(*GRAPHS, "task=predict", "data.collate=setpkg:join")
    assert found.labels_of(found.predictions).tolist() == [index % 3 for index in range(7)]
    of_nodes = executed(*GRAPHS, "task=predict", "data.collate=setpkg:join_nodes")
    with pytest.raises(HookrunError, match="'setpkg:join_nodes' does not return one target for each sample"):
        of_nodes.labels(torch.tensor([0]), "val")


def test_workers_change_nothing_and_draws_of_the_function_follow_the_seed(executed) -> None:
    noisy = (*GRAPHS, "train.epochs=1", "data.collate=setpkg:join_noisily")
    losses = [executed(*noisy, f"data.workers={count}").metrics for count in (0, 2)]
    assert losses[0] == losses[1]
    assert executed(*noisy, "seed=1").metrics != losses[0]


def test_a_resumed_run_ends_as_a_whole_one(run, tmp_path) -> None:
    wanted = (*GRAPHS, *QUICK, "data.collate=setpkg:join_noisily", CAPTURE)
    whole = run(*wanted)
    (tmp_path / "stop").touch()
    stopped = run(*wanted, code=143)
    assert main([f"resume={stopped.path}"]) == 0
    resumed = hookrun.open_run(stopped.path)
    assert resumed.metrics == whole.metrics
    for name in ("inner", "outer"):
        rows, same = resumed.captures["c"][name], whole.captures["c"][name]
        assert len(rows) == len(same) and torch.equal(rows.sample_ids, same.sample_ids)


def test_a_detector_gets_lists_and_its_metric_the_targets_themselves(executed) -> None:
    trained = executed(
        *SCENES, "data.collate=setpkg:with_targets", "train.loss=setpkg:total", "train.epochs=1",
        "task.metrics=['setpkg:boxes_wanted']",
    )  # fmt: skip
    wanted = [index % 3 for index in range(7)]
    assert trained.metrics[-1]["boxes_wanted"] == pytest.approx(sum(wanted) / 7)
    found = executed(*SCENES, "task=predict", "data.collate=list")
    model, scenes = seeded("Detector").eval(), module().Scenes("val")
    expected = [model([scenes[index][0]])[0]["boxes"] for index in range(7)]
    first = found.predictions["[0].boxes"]
    assert first.sample_ids.tolist() == [-1] * 4, "a list belongs to no single sample"
    torch.testing.assert_close(first[:], torch.stack(expected[::2]))


# ---- lists, and samples alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [("data.batch_size=3", "data.collate=list"), ("data.batch_size=null",)])
def test_clouds_of_different_sizes_are_predicted_and_scored_one_by_one(executed, batching) -> None:
    model, clouds = seeded("CloudNet"), module().Clouds("val")
    scores = torch.stack([model(clouds[index][0]) for index in range(7)])
    labels = torch.tensor([index % 2 for index in range(7)])
    predicted = executed(*CLOUDS, "task=predict", *batching)
    assert predicted.predictions.sample_ids.tolist() == list(range(7))
    torch.testing.assert_close(predicted.predictions[:], scores.detach())
    found = executed(*CLOUDS, "task=evaluate", *batching)
    assert found.metrics[-1]["loss"] == pytest.approx(cross_entropy(scores, labels).item())
    assert found.metrics[-1]["accuracy"] == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
    assert [line["class"] for line in lines_of(found)] == [str(label) for label in labels.tolist()]
    few = executed(*CLOUDS, "task=predict", *batching, "train.limit_batches=2")
    assert len(few.predictions) == (6 if "data.collate=list" in batching else 2)


def test_conditions_on_labels_choose_samples_of_a_list(executed) -> None:
    hook = "+hooks.c={select: outer, hook: forward, action: capture, when: {data: {label: 1}}}"
    found = executed(*CLOUDS, "task=predict", "data.batch_size=3", "data.collate=list", hook)
    assert found.captures["c"]["outer"].sample_ids.tolist() == [1, 3, 5]


def test_a_tuple_of_inputs_is_stacked_to_the_arguments_of_the_model(executed) -> None:
    own = ("model=python", "model.factory=setpkg:PairNet", "data=python", "data.factory=setpkg:Pairs")
    found = executed(*own, "task=predict", "data.batch_size=4")
    model, pairs = seeded("PairNet"), module().Pairs("val")
    expected = torch.stack([model(*pairs[index][0]) for index in range(7)])
    torch.testing.assert_close(found.predictions[:], expected.detach())


def test_the_fields_of_a_dataclass_are_stacked_to_one_argument(executed) -> None:
    own = ("model=python", "model.factory=setpkg:EndsNet", "data=python", "data.factory=setpkg:PairsOfEnds")
    found = executed(*own, "task=predict", "data.batch_size=4")
    model, pairs = seeded("EndsNet"), module().PairsOfEnds("val")
    expected = torch.stack([model(pairs[index][0]) for index in range(7)])
    torch.testing.assert_close(found.predictions[:], expected.detach())


def test_an_object_of_ones_own_is_the_one_argument(executed) -> None:
    own = ("model=python", "model.factory=setpkg:RingNet", "data=python", "data.factory=setpkg:Rings")
    found = executed(*own, "task=evaluate", "data.batch_size=null")
    model, rings = seeded("RingNet"), module().Rings("val")
    losses = [cross_entropy(model(rings[index][0]), torch.tensor([index % 2])).item() for index in range(7)]
    assert found.metrics[-1]["loss"] == pytest.approx(sum(losses) / 7)


def test_the_plan_shows_a_batch(ready) -> None:
    prepared = ready(*GRAPHS, "data.collate=setpkg:join", "task=evaluate")
    assert (
        prepared.lines[0] == "a batch, for example: the model's arguments "
        "({x: [7, 5], edge_index: [2, 7], graph: [7], size: int}), targets [2]"
    )


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["data.collate=stck"], "data.collate: unknown way to make batches 'stck'; did you mean 'stack'?"),
        (["data.collate=other:join"], "data.collate: the package 'other' is not trusted"),
        (["data.collate=setpkg:joni"], "data.collate: 'setpkg' has no function or class 'joni'"),
        (["data.collate=setpkg:raises"], "data.collate: 'setpkg:raises' failed: KeyError: 'no such key'"),
        (["data.collate=setpkg:number"], "data.collate: 'setpkg:number' returned a int, expected (inputs, targets)"),
        (["data.collate=setpkg:none"], "data.collate: 'setpkg:none' takes 0 positional arguments"),
        (["data.collate=list", "data.batch_size=null"], "with data.batch_size=null samples are not collated"),
        ([], "for anything else set data.collate=mypkg.data:collate"),
        (["data.factory=setpkg:Clouds"], "cannot be joined: RuntimeError: stack expects each tensor to be equal size"),
        (["data.factory=setpkg:Clouds"], "use data.collate=list, a function of your own"),
        (["data.factory=setpkg:Rings"], "samples of the form (Ring, []) cannot be joined"),
        (["data.factory=setpkg:Scenes", "data.collate=list"], "'setpkg:Scenes' has no targets"),
        (["data.collate=setpkg:join", "compute.strategy=ddp"], "data.collate: compute.strategy=ddp needs a row"),
        (["data.collate=setpkg:join", "task=attribute"], "data.collate: task=attribute needs a row for each sample"),
        (["data.collate=setpkg:join", "task=export"], "data.collate: task=export needs a row for each sample"),
        (
            ["data.collate=setpkg:join_nodes", "task=evaluate", "task.backward={score: loss}"],
            "data.collate: task.backward needs a row for each sample",
        ),
        (["data=names", "data.batch_size=null", "model=mlp"], "data.batch_size: sequences of tokens"),
        (
            ["data.collate=setpkg:join_nodes", "task=evaluate", "task.metrics=[{name: accuracy, by: sample}]"],
            "task.metrics.0.by: the batches of the data 'setpkg:Graphs' have no target for each sample",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_a_batch_is_refused_before_the_run(refused, given: list[str], says: str) -> None:
    overrides = GRAPHS if "data=names" not in given else ()
    assert says in refused(*overrides, *given).replace("\n      ", " ")


def test_float_labels_are_refused_with_the_argument_and_numbers_to_predict_are_not(
    refused, ready, tmp_path
) -> None:
    np.savez(tmp_path / "x.npz", input=np.ones((8, 4), np.float32), target=np.arange(8.0))
    own = ("data=tensors", "data.args.file=x.npz", "model=mlp", "model.args.num_classes=1")
    for loss in ("cross_entropy", "nll"):
        assert f"data.args.target: '{loss}' needs integer labels" in refused(*own, f"train.loss={loss}")
    ready(*own, "train.loss=mse")
    assert "or integers if these are labels of classes" in refused(*own[:-1], "model.args.num_classes=3")


def test_a_condition_on_labels_needs_a_label_for_each_sample(refused) -> None:
    hook = "+hooks.c={select: outer, hook: forward, action: capture, when: {data: {label: 1}}}"
    assert "label" in refused(*GRAPHS, "data.collate=setpkg:join_nodes", hook)


def test_a_batch_that_fails_later_is_told_in_one_line_also_by_a_worker(fails) -> None:
    late = (*GRAPHS, "task=evaluate", "data.collate=setpkg:fails_late", "train.limit_batches=1")
    said = [fails(*late, f"data.workers={count}") for count in (0, 1)]
    assert said[0] == said[1]
    assert "data.collate: 'setpkg:fails_late' failed: AssertionError: a graph is too large" in said[0]
    assert "\n" not in said[0]


def test_a_model_that_takes_another_form_names_the_key(fails) -> None:
    said = fails("model=mlp", "data=digits", "data.collate=list", "data.batch_size=2", "task=evaluate")
    assert (
        said.startswith("data.collate: the model fails: ")
        and "it was called with (([1, 8, 8], [1, 8, 8]))" in said
    )


# ---- parts -------------------------------------------------------------------------------------------------------


def test_a_mapping_is_keywords_a_tuple_arguments_and_anything_else_one_argument() -> None:
    model, x = nn.Identity(), torch.zeros(2)
    packed = pack_sequence([torch.zeros(2, 1)])
    encoding = BatchEncoding({"input_ids": x})
    assert as_call((x, [x]), model) == ((x, [x]), {})
    assert as_call(encoding, model) == ((), {"input_ids": x})
    for whole in (x, [x, x], packed):
        assert as_call(whole, model) == ((whole,), {})


def test_what_has_a_method_to_moves_itself() -> None:
    packed = pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)])
    value = {
        "packed": packed,
        "both": (torch.zeros(1), "a name"),
        "encoding": BatchEncoding({"x": torch.zeros(1)}),
    }
    describe(Data(name="python", factory="setpkg:Rings", batch_size=None))  # imports the package
    ring = module().Ring(torch.zeros(1))
    assert moved([ring], "meta")[0].x.is_meta and not ring.x.is_meta
    there: Any = moved(value, "meta", non_blocking=True)
    assert isinstance(there["packed"], PackedSequence) and there["packed"].data.is_meta
    assert there["packed"].batch_sizes.device.type == "cpu", "where torch needs them"
    assert there["both"][0].is_meta and there["both"][1] == "a name"
    assert there["encoding"]["x"].is_meta and value["both"][0].device.type == "cpu"


@pytest.mark.parametrize("size", [2, 3])
def test_an_example_is_made_as_the_batches_of_a_run(size: int) -> None:
    def own(**more: Any) -> Data:
        return Data(name="python", factory="setpkg:Graphs", collate="setpkg:join", **more)

    inputs, labels = describe(own()).example_of(size)
    assert len(labels) == inputs.size == size
    expected, _ = module().join([module().Graphs("train")[index] for index in range(size)])
    assert torch.equal(inputs.x, expected.x)
    listed: Sequence[Any] = describe(Data(name="digits", collate="list")).example_of(size)
    assert [each.shape for each in listed[0]] == [(1, 8, 8)] * size and listed[1].shape == (size,)
    alone, label = describe(Data(name="digits", batch_size=None)).example_of(size)
    assert alone.shape == (1, 8, 8) and label.shape == ()
    assert describe(own(batch_size=1)).example_of(size)[0].size == 1, "batches of one are tried with one"
