"""A module and data given from Python: the same run as with those that the configuration names, and its record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from hookrun import SpecError, open_run
from hookrun.command.cli.commands import execute
from hookrun.command.outcome import Outcome
from hookrun.data import load
from hookrun.data.settings import Data
from hookrun.models import build
from hookrun.models.settings import Model
from hookrun.run.experiment.given import Given
from hookrun.store.summary import headline, summary_of

CAPTURE = "+hooks.seen={select: fc, hook: forward, action: capture}"
IN_VALIDATION = "+hooks.seen={select: fc, hook: forward, action: capture, when: {mode: eval}}"


class Net(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(images.flatten(1))
        return scores


def network(seed: int = 0, classes: int = 10) -> Net:
    torch.manual_seed(seed)
    return Net(classes)


def dataset(count: int = 30, shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, 8, 8, generator=generator) + shift
    return TensorDataset(images, torch.arange(count) % 10)


def splits(**options: Any) -> dict[str, Any]:
    return {"train": dataset(**options), "val": dataset(**options)}


def command(*arguments: str, model: Any = None, data: Any = None) -> Outcome:
    outcome = Outcome()
    execute(arguments, outcome, Given(model, data))
    return outcome


def run(folder: Path, *overrides: str, **given: Any) -> Any:
    outcome = command(f"hydra.run.dir={folder}", "compute.threads=1", *overrides, **given)
    assert outcome.errors == []
    return open_run(folder)


def refused(folder: Path, *overrides: str, **given: Any) -> str:
    with pytest.raises(SpecError) as error:
        command(f"hydra.run.dir={folder}", *overrides, **given)
    assert not folder.exists()
    return str(error.value)


def results(made: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in made.metrics]


def breaking(module: Net, at: int) -> None:
    """Let the training forward number `at` fail."""
    calls = [0]

    def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
        if layer.training and not isinstance(output, FakeTensor):
            calls[0] += 1
            if calls[0] == at:
                raise RuntimeError("the power went out")

    module.fc.register_forward_hook(hook)


class TestTheSameRun:
    """Model and data given, or named in the configuration: the numbers are the same, bit for bit."""

    def cnn(self) -> nn.Module:
        torch.manual_seed(0)
        return build(Model(name="cnn"), sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())

    def digits(self) -> dict[str, Any]:
        sets = dict[str, Any]()
        for split in ("train", "val"):
            samples = load(Data(name="digits"), split, seed=0)  # type: ignore[arg-type]
            sets[split] = TensorDataset(*samples.batch(range(len(samples))))  # type: ignore[misc]
        return sets

    @pytest.mark.parametrize("form", ["data sets", "lists", "loaders"])
    def test_training_has_the_same_metrics_and_captures(self, form: str, tmp_path: Path) -> None:
        keys = ["train.epochs=1", "train.shuffle=false", "train.limit_batches=4", IN_VALIDATION]
        named = run(tmp_path / "named", *keys)
        data = self.digits()
        if form == "lists":
            data = {split: list(each) for split, each in data.items()}
        if form == "loaders":
            data = {split: DataLoader(each, batch_size=64) for split, each in data.items()}
        given = run(tmp_path / "given", *keys, model=self.cnn(), data=data)
        assert results(given) == results(named)
        assert given.plan["hash"] == named.plan["hash"]
        rows = given.captures["seen"]["fc"]
        assert torch.equal(rows[:], named.captures["seen"]["fc"][:])
        assert rows.sample_ids.tolist() == named.captures["seen"]["fc"].sample_ids.tolist()

    def test_a_shuffled_data_set_has_the_same_order(self, tmp_path: Path) -> None:
        keys = ["train.epochs=2", "train.limit_batches=3"]
        named = run(tmp_path / "named", *keys)
        assert results(run(tmp_path / "given", *keys, model=self.cnn(), data=self.digits())) == results(named)


class TestModule:
    """The module that is given is trained in place, and otherwise left as it was."""

    def test_it_is_trained_in_place(self, tmp_path: Path) -> None:
        module = network()
        made = run(tmp_path / "run", "train.epochs=1", model=module, data=splits())
        with torch.no_grad():
            images, labels = dataset().tensors
            loss = nn.functional.cross_entropy(module(images), labels)
        assert made.metrics[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert not torch.equal(module.fc.weight, network().fc.weight)

    @pytest.mark.parametrize("training", [True, False])
    def test_it_keeps_its_mode_and_has_no_hooks(self, training: bool, tmp_path: Path) -> None:
        module = network().train(training)
        run(tmp_path / "run", "train.epochs=1", CAPTURE, model=module, data=splits())
        assert module.training is module.fc.training is training
        assert not module.fc._forward_hooks
        assert module.fc.weight.grad is None

    def test_its_gradients_are_as_before(self, tmp_path: Path) -> None:
        module = network()
        module.fc.weight.grad = torch.ones(10, 64)
        run(tmp_path / "run", "train.epochs=1", model=module, data=splits())
        assert torch.equal(module.fc.weight.grad, torch.ones(10, 64))

    def test_its_frozen_parameters_stay_frozen(self, tmp_path: Path) -> None:
        module = network()
        module.fc.bias.requires_grad_(False)
        run(tmp_path / "run", "train.epochs=1", model=module, data=splits())
        assert torch.equal(module.fc.bias, network().fc.bias)
        assert [each.requires_grad for each in module.parameters()] == [True, False]

    def test_a_module_of_inference_mode_is_evaluated(self, tmp_path: Path) -> None:
        with torch.inference_mode():
            module = network()
        made = run(tmp_path / "run", "task=evaluate", model=module, data=dataset())
        other = run(tmp_path / "other", "task=evaluate", model=network(), data=dataset())
        assert results(made) == results(other)

    def test_what_the_run_freezes_is_free_again(self, tmp_path: Path) -> None:
        module = network()
        run(tmp_path / "run", "train.epochs=1", "train.parameters=fc.bias", model=module, data=splits())
        assert torch.equal(module.fc.weight, network().fc.weight)
        assert all(each.requires_grad for each in module.parameters())

    def test_hooks_of_its_own_run_and_are_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = network()
        seen = list[int]()
        module.fc.register_forward_hook(lambda layer, args, output: seen.append(len(output)))
        run(tmp_path / "run", "task=evaluate", model=module, data=dataset())
        assert seen[-1] == 30
        assert "with 1 hook of its own, which also run in the trial run" in capsys.readouterr().out
        assert len(module.fc._forward_hooks) == 1

    def test_a_step_is_repeated_with_its_draws(self, tmp_path: Path) -> None:
        module = network()
        draws = list[float]()

        def drawing(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            draws.append(float(np.random.rand()))
            return output * float("nan")

        module.fc.register_forward_hook(drawing)
        outcome = command(f"hydra.run.dir={tmp_path / 'run'}", model=module, data=dataset())
        (error,) = outcome.errors
        assert "the loss is nan" in str(error)
        assert draws[-1] == draws[-2]

    def test_a_failed_run_leaves_it_usable(self, tmp_path: Path) -> None:
        module = network().eval()
        breaking(module, at=1)
        outcome = command(f"hydra.run.dir={tmp_path / 'run'}", CAPTURE, model=module, data=splits())
        (error,) = outcome.errors
        assert isinstance(error, RuntimeError)
        assert not module.training
        assert len(module.fc._forward_hooks) == 1

    def test_it_is_recorded_by_class_shapes_and_hash(self, tmp_path: Path) -> None:
        records = list[Any]()
        for place, module in enumerate((network(), network(), network(seed=1), network(classes=11))):
            made = run(tmp_path / str(place), "task=evaluate", model=module, data=dataset())
            assert made.config["model"]["name"] == "given"
            records.append(made.config["model"]["args"])
        first, same, other_weights, other_shapes = records
        assert first == same
        assert first["class"].endswith("test_given.Net")
        assert first["shapes"] == other_weights["shapes"] != other_shapes["shapes"]
        assert first["weights"] != other_weights["weights"]

    @pytest.mark.parametrize(
        ("override", "where"),
        [
            ("model=mlp", "model=mlp"),
            ("model.args.channels=[4]", "model.args.channels=[4]"),
            ("model.weights=a.safetensors", "model.weights"),
            ("compute=ddp", "compute.strategy"),
            ("task=compare", "task"),
        ],
    )
    def test_what_does_not_go_with_it_is_refused(self, override: str, where: str, tmp_path: Path) -> None:
        assert f"\n  {where}: " in refused(tmp_path / "run", override, model=network(), data=dataset())

    def test_its_class_is_the_model_of_titles(self, tmp_path: Path) -> None:
        run(tmp_path / "run", "task=evaluate", model=network(), data=dataset())
        assert headline(summary_of(tmp_path / "run")).startswith("evaluate · Net")

    @pytest.mark.parametrize("wrong", [lambda images: images, "cnn"])
    def test_what_is_not_a_module_is_refused(self, wrong: Any, tmp_path: Path) -> None:
        assert "expected a torch.nn.Module" in refused(tmp_path / "run", model=wrong)

    def test_a_class_is_not_its_module(self, tmp_path: Path) -> None:
        found = refused(tmp_path / "run", model=Net)
        assert "found the class Net, expected a module\n      give Net(…)" in found

    def test_a_name_in_a_file_does_not_stand_for_it(self, tmp_path: Path) -> None:
        assert "model=MODULE" in refused(tmp_path / "run", "model.name=given")

    def test_a_need_has_the_model_of_its_experiment(self, tmp_path: Path) -> None:
        folder = tmp_path / "conf" / "experiment"
        folder.mkdir(parents=True)
        text = "# @package _global_\ntask: {name: evaluate}\nneeds: {first: {experiment: clip_fc,"
        (folder / "two.yaml").write_text(f"{text} overrides: [train.epochs=1, train.limit_batches=1]}}}}\n")
        arguments = ["--config-dir", str(tmp_path / "conf"), "experiment=two", "train.limit_batches=1"]
        made = run(tmp_path / "run", *arguments, model=network())
        need = next((Path("outputs") / "needs").rglob(".hydra")).parent
        assert open_run(need).config["model"]["name"] == "cnn"
        assert made.config["model"]["name"] == "given"


def numbered(count: int) -> list[tuple[Tensor, int]]:
    return list(dataset(count))  # type: ignore[arg-type]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(dataset())


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Endless:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        for start in itertools.cycle((0, 2, 4)):
            yield [start, start + 1]


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


class TestData:
    """Data in any of its forms, with the numbers of its samples."""

    @pytest.mark.parametrize(
        "form",
        [
            lambda data: data,
            list,
            lambda data: [(image.numpy(), int(label)) for image, label in data],
            lambda data: {"val": data},
            lambda data: DataLoader(data, batch_size=7),
            lambda data: DataLoader(data, batch_size=7, shuffle=True),
            lambda data: DataLoader(data, batch_size=7, num_workers=1),
            lambda data: DataLoader(data, batch_size=7, collate_fn=stacked),
            lambda data: DataLoader(data, batch_sampler=[[3, 1], list(range(4, 30)), [0, 2]]),
        ],
        ids=[
            "data-set",
            "list",
            "arrays",
            "mapping",
            "loader",
            "shuffled",
            "workers",
            "collate-fn",
            "batch-sampler",
        ],
    )
    def test_each_row_has_the_number_of_its_sample(self, form: Callable[[Any], Any], tmp_path: Path) -> None:
        module = network()
        made = run(tmp_path / "run", "task=evaluate", CAPTURE, model=module, data=form(dataset()))
        rows = made.captures["seen"]["fc"]
        images, labels = dataset().tensors
        with torch.no_grad():
            scores = module(images)
        assert rows.sample_ids.tolist() == list(range(30))
        assert torch.allclose(rows[:], scores, atol=1e-5)
        loss = nn.functional.cross_entropy(scores, labels).item()
        assert made.metrics[-1]["loss"] == pytest.approx(loss, rel=1e-5)

    def test_a_loader_keeps_its_batches(self, tmp_path: Path) -> None:
        sampler = WeightedRandomSampler(
            [1.0] * 5 + [0.0] * 25, 12, generator=torch.Generator().manual_seed(3)
        )
        before = sampler.generator.get_state()
        loader = DataLoader(dataset(), batch_size=4, sampler=sampler)
        seen = list[int]()
        module = network()
        module.fc.register_forward_hook(lambda layer, args, output: seen.append(len(output)))
        made = run(tmp_path / "run", "task=predict", model=module, data=loader)
        assert seen[-3:] == [4, 4, 4]
        assert made.config["data"]["batch_size"] == 4
        assert {line["sample"] for line in made.samples.lines} <= set(range(5))
        assert torch.equal(sampler.generator.get_state(), before)

    @pytest.mark.parametrize(
        ("task", "split"), [("train", "train"), ("evaluate", "val"), ("predict", "val"), ("plan", "train")]
    )
    def test_without_a_split_the_task_says_it(
        self, task: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = Given(network(), dataset())
        shown = list[Any]()
        monkeypatch.setattr("hookrun.run.tasks.show", shown.append)
        arguments = [f"task={task}", f"hydra.run.dir={tmp_path / 'run'}", "train.limit_batches=1"]
        execute(arguments if task != "train" else [*arguments, "train.epochs=1"], given=given)
        if shown:
            assert shown[0].data.sizes[split] == 30
        else:
            assert list(open_run(tmp_path / "run").config["data"]["args"]) == [split]

    def test_a_split_that_was_typed_is_meant(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "task=evaluate", "task.split=train", model=network(), data=dataset())
        assert list(made.config["data"]["args"]) == ["train"]

    def test_a_sampler_that_never_ends_is_cut(self, tmp_path: Path) -> None:
        loader = DataLoader(dataset(), batch_sampler=Endless())  # type: ignore[arg-type]
        made = run(tmp_path / "run", "task=predict", CAPTURE, model=network(), data=loader)
        assert made.captures["seen"]["fc"].sample_ids.tolist() == [0, 1, 2, 3, 4, 5]

    def test_another_dtype_is_told_before(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        images, labels = dataset().tensors
        data = TensorDataset(images.double(), labels)
        execute(["task=plan"], given=Given(network(), data))
        assert (
            "same dtype, but got torch.float32 and torch.float64 (in fc, a Linear)" in capsys.readouterr().out
        )

    def test_samples_may_have_no_target(self, tmp_path: Path) -> None:
        images = list(dataset().tensors[0])
        made = run(tmp_path / "run", "task=predict", model=network(), data=images)
        with torch.no_grad():
            assert torch.allclose(made.predictions[:], network()(torch.stack(images)), atol=1e-6)

    def test_a_dict_has_the_keywords_of_the_model(self, tmp_path: Path) -> None:
        images = dataset().tensors[0]
        data = [{"images": image} for image in images]
        made = run(tmp_path / "run", "task=predict", model=network(), data=data)
        with torch.no_grad():
            assert torch.allclose(made.predictions[:], network()(images), atol=1e-6)

    def test_it_is_recorded_by_class_number_and_hash(self, tmp_path: Path) -> None:
        records = list[Any]()
        for place, data in enumerate((dataset(), dataset(), dataset(shift=1), dataset(31))):
            made = run(tmp_path / str(place), "task=evaluate", model=network(), data=data)
            assert made.config["data"]["name"] == "given"
            records.append(made.config["data"]["args"]["val"])
        first, same, other, longer = records
        assert first == same
        assert first["class"] == "torch.utils.data.dataset.TensorDataset"
        assert (first["samples"], longer["samples"]) == (30, 31)
        assert first["hash"] != other["hash"]

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            ([], "the list has no samples"),
            ({}, "a mapping without splits"),
            ({"validation": dataset()}, "found the split 'validation'"),
            ({"train": dataset()}, "the split 'val' has no samples"),
            (dataset().tensors, "a tuple may be samples, or inputs and targets"),
            (Stream(), "the Stream has no samples that can be read by their numbers"),
            (DataLoader(Stream()), "the Stream has no samples that can be read by their numbers"),
            ((pair for pair in dataset()), "the generator has no samples"),
            (
                DataLoader(dataset(), batch_size=None),
                "does not make so many batches from lists of the numbers",
            ),
            (DataLoader(dataset(), sampler=Unsized()), "does not make so many batches"),  # type: ignore[arg-type]
            (DataLoader(dataset(), collate_fn=lambda samples: (1, 2, 3)), "a batch is a tuple of 3"),
            ([(1, 2, 3)], "sample 0 of the list is a tuple of 3"),
            (["a text"], "sample 0 of the list holds a str"),
            ([(torch.ones(64), 1), (torch.ones(65), 1)], "samples of the form"),
            (Failing(), "OSError: the disk is gone"),
            (3, "the int has no samples"),
        ],
    )
    def test_other_data_is_refused(self, data: Any, what: str, tmp_path: Path) -> None:
        assert what in refused(tmp_path / "run", "task=evaluate", model=network(), data=data)

    def test_loaders_of_different_functions_are_refused(self, tmp_path: Path) -> None:
        data = {"train": DataLoader(dataset(), collate_fn=stacked), "val": dataset()}
        assert "by different functions" in refused(tmp_path / "run", model=network(), data=data)

    @pytest.mark.parametrize("override", ["data=digits", "+data.transforms.flatten={}", "data.batch_size=3"])
    def test_what_a_loader_decides_cannot_be_typed(self, override: str, tmp_path: Path) -> None:
        data = DataLoader(dataset(), batch_size=5)
        text = refused(tmp_path / "run", "task=evaluate", override, model=network(), data=data)
        assert "data is given from Python" in text

    def test_the_batch_size_of_a_data_set_can_be_typed(self, tmp_path: Path) -> None:
        seen = list[int]()
        module = network()
        module.fc.register_forward_hook(lambda layer, args, output: seen.append(len(output)))
        run(tmp_path / "run", "task=evaluate", "data.batch_size=20", model=module, data=dataset())
        assert seen[-2:] == [20, 10]

    def test_a_loader_decides_for_its_split_alone(self, tmp_path: Path) -> None:
        data = {"train": dataset(), "val": DataLoader(dataset(), batch_size=5)}
        made = run(tmp_path / "run", "train.epochs=1", "data.batch_size=15", model=network(), data=data)
        assert made.config["data"]["batch_size"] == 15
        assert made.metrics[-1]["step"] == 2

    def test_labels_are_not_read_from_elsewhere(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "task=evaluate", CAPTURE, model=network(), data=dataset())
        with pytest.raises(SpecError, match="the data was given from Python"):
            made.labels(torch.tensor([0]))
        with pytest.raises(SpecError, match="the data was given from Python"):
            made.dataset(made.captures["seen"]["fc"])


class TestResuming:
    """A run goes on with the same class, shapes and data; with anything else it is refused."""

    KEYS = ("train.epochs=3", "train.checkpoint.every={steps: 3}", "data.batch_size=8", IN_VALIDATION)

    def broken(self, folder: Path, *keys: str, data: Any = None) -> Path:
        module = network()
        breaking(module, at=7)
        keys = (*(keys or self.KEYS), f"hydra.run.dir={folder}", "compute.threads=1")
        assert command(*keys, model=module, data=data or splits()).errors
        return folder

    def resume(self, folder: Path, *overrides: str, **given: Any) -> Any:
        assert command(f"resume={folder}", *overrides, **given).errors == []
        return open_run(folder)

    @pytest.mark.parametrize("shuffles", [False, True])
    def test_a_fresh_module_goes_on_to_the_same_end(self, shuffles: bool, tmp_path: Path) -> None:
        keys = tuple(key for key in self.KEYS if not shuffles or "batch_size" not in key)

        def data() -> Mapping[str, Any]:
            if not shuffles:
                return splits()
            return {"train": DataLoader(dataset(), batch_size=8, shuffle=True), "val": dataset()}

        whole = run(tmp_path / "whole", *keys, model=network(), data=data())
        folder = self.broken(tmp_path / "broken", *keys, data=data())
        module = network(seed=5)
        made = self.resume(folder, model=module, data=data())
        assert results(made) == results(whole)
        assert torch.equal(made.captures["seen"]["fc"][:], whole.captures["seen"]["fc"][:])

    def test_the_command_line_says_how_to_go_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = self.broken(tmp_path / "run")
        call = "hookrun.run(model=…, data=…, overrides=['resume="
        assert f"to go on: {call}" in capsys.readouterr().err
        with pytest.raises(SpecError) as error:
            command(f"resume={folder}")
        assert f"{call}{folder}'])" in str(error.value)

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            ({"model": network(classes=11), "data": splits()}, "model.shapes"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "data": splits()}, "model.class"),
            ({"model": network(), "data": splits(shift=1)}, "data.train.hash"),
            ({"model": network(), "data": splits(count=31)}, "data.val.samples"),
            ({"model": network()}, "was given data from Python"),
        ],
        ids=["shapes", "class", "hash", "number", "data"],
    )
    def test_anything_else_is_refused(self, given: dict[str, Any], what: str, tmp_path: Path) -> None:
        folder = self.broken(tmp_path / "run")
        before = (folder / "status.json").read_bytes()
        with pytest.raises(SpecError, match=what):
            command(f"resume={folder}", **given)
        assert (folder / "status.json").read_bytes() == before

    def test_other_weights_are_refused_without_a_state(self, tmp_path: Path) -> None:
        folder = self.broken(
            tmp_path / "run", "train.epochs=3", "data.batch_size=8", "train.checkpoint.every=null"
        )
        with pytest.raises(SpecError, match=r"model\.weights"):
            command(f"resume={folder}", model=network(seed=5), data=splits())
        self.resume(folder, model=network(), data=splits())

    def test_a_run_of_a_named_model_takes_none(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        command(
            f"hydra.run.dir={folder}",
            "train.epochs=1",
            "+hooks.x={select: fc, hook: forward, action: check, max: 0}",
        )
        with pytest.raises(SpecError, match="names its model"):
            command(f"resume={folder}", model=network())

    def test_parameters_that_hooks_added_do_not_count(self, tmp_path: Path) -> None:
        module = network()
        breaking(module, at=7)
        bias = "+hooks.b={select: fc, hook: forward, action: add_bias, value: 0.0, trainable: true}"
        folder = tmp_path / "run"
        keys = ("train.epochs=3", "data.batch_size=8", "train.checkpoint.every={steps: 3}", bias)
        assert command(f"hydra.run.dir={folder}", *keys, model=module, data=splits()).errors
        assert "fc.b_bias" in dict(module.named_parameters())
        module.fc._forward_hooks.clear()
        self.resume(folder, model=module, data=splits())


class TestSweep:
    """Each job of a sweep has a copy of the module, with the weights that it has."""

    KEYS = ("train.epochs=1", "compute.threads=1", "train.optimizer.lr=0.001,0.1")

    def test_each_job_starts_from_the_same_weights(self, tmp_path: Path) -> None:
        module = network()
        command("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *self.KEYS, model=module, data=splits())
        assert torch.equal(module.fc.weight, network().fc.weight)
        for number, rate in enumerate(("0.001", "0.1")):
            keys = ("train.epochs=1", f"train.optimizer.lr={rate}")
            alone = run(tmp_path / rate, *keys, model=network(), data=splits())
            assert results(open_run(tmp_path / "sweep" / str(number))) == results(alone)

    def test_it_goes_on_only_with_what_was_given(self, tmp_path: Path) -> None:
        folder = tmp_path / "sweep"
        command("-m", f"hydra.sweep.dir={folder}", *self.KEYS, model=network(), data=splits())
        with pytest.raises(SpecError, match="was given model and data from Python") as error:
            command("-m", f"resume={folder}")
        assert "hookrun.sweep(model=…, data=…, " in str(error.value)
        assert command("-m", f"resume={folder}", model=network(), data=splits()).sweep_dir == folder

    def test_a_swept_key_of_the_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="model is given from Python"):
            command("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "model=cnn,mlp", model=network())


class Hostile(Net):
    """A class whose name is an interpolation, markup and very long."""


Hostile.__qualname__ = "<b>${oc.env:HOME}\x1b[31m" * 400


class TestNames:
    """Names of classes are text: they enter a configuration and a page, and mean nothing there."""

    def test_a_hostile_class_name_is_kept_as_text(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "task=evaluate", model=Hostile(), data=dataset())
        name = made.config["model"]["args"]["class"]
        assert "<b>$ {oc.env:HOME}" in name
        assert "\x1b" not in name
        assert len(name) < 2_000

    def test_a_module_that_is_not_initialized_is_refused(self, tmp_path: Path) -> None:
        module = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        text = refused(tmp_path / "run", "task=evaluate", model=module, data=dataset())
        assert "1.weight is not initialized yet" in text
