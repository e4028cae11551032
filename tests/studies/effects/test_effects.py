"""task=effects: every cell equals a plain forward pass with a hook of its own, on any model."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import hookrun
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.studies.effects import cells
from hookrun.studies.effects.records import Effects

DECODER = (
    "model=decoder", "model.args={layers: 2, heads: 4, width: 16}", "data=repeated_tokens",
    "data.args={half: [3, 6], val_size: 11, vocab_size: 32}", "data.batch_size=4",
)  # fmt: skip
DIGITS = ("data.batch_size=5", "train.limit_batches=3")


@pytest.fixture
def effects(executed) -> Callable[..., Effects]:
    """Perform the task alone, with a hook called `h`."""
    return lambda *given, **metric: executed(*words(*given, **metric)).effects


def test_layers_of_different_width_make_one_grid(executed, effects, capsys) -> None:
    hook = "{select: [relu1, relu2], hook: forward, action: replace, value: 0}"
    made = executed(*words(hook, "{module: each, index: each}", *DIGITS))
    found, (model, batches) = made.effects, plain(*DIGITS)
    assert found.axes["module"] == ["relu1", "relu2"]
    assert found["exact"].shape == (2, 128)
    assert found["exact_samples"].shape == (2, 128, 15)
    assert found["exact"][0, 32:].isnan().all(), "relu1 has 32 channels"
    for row, path in enumerate(["relu1", "relu2"]):
        wanted = by_hand(model, batches, [path], put(slice(None), 7), of_labels)
        close(found["exact_samples"][row, 7], wanted)
        close(found["exact"][row, 7], wanted.mean())
    lines = list(csv.DictReader((made.path / "effects.csv").read_text().splitlines()))
    numbers = ["exact", "gradient", "restored", "placebo_mean", "placebo_std"]
    assert list(lines[0]) == ["module", "index", *numbers]
    assert len(lines) == 32 + 128, "a row for each site that exists"
    assert float(lines[7]["exact"]) == found["exact"][0, 7]
    assert lines[7]["gradient"] == ""
    some = effects(hook, "{module: [relu1], index: [3, 0]}", *DIGITS)  # whole numbers are channels
    close(some["exact"][0], found["exact"][0, [3, 0]])
    said = capsys.readouterr().out
    assert "index: each counts dimension 1 of values of shape [2, 32, 8, 8], [2, 128, 4, 4]; " in said
    assert "largest effect: module=relu1, index=:, " in said


def test_a_window_over_the_input_is_occlusion(effects) -> None:
    hook = "{select: '', hook: forward_pre, action: scale, factor: 0}"
    found = effects(hook, "{index: {window: [3, 3], stride: [2, 2]}}", *DIGITS, metric="probability")
    model, batches = plain(*DIGITS)
    starts = [0, 2, 4, 6]
    assert found.axes["index"][-1] == "..., 6:8, 6:8", "the last window is cut off by the border"
    for place, (row, column) in enumerate((row, column) for row in starts for column in starts):
        window = (..., slice(row, row + 3), slice(column, column + 3))
        chance = lambda out, target: out.softmax(1).gather(1, target[:, None]).squeeze(1)  # noqa: E731
        close(found["exact_samples"][place], by_hand(model, batches, [""], put(*window), chance, pre=True))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_heads_of_padded_sequences_make_a_grid(padding: str, effects) -> None:
    padded = (*DECODER, f"data.args.padding={padding}")
    zero = "{select: 'blocks.*.attn.z', hook: forward, action: replace, value: 0"
    found, (model, batches) = effects(zero + "}", "{module: each, heads: each}", *padded), plain(*padded)
    for row, path in enumerate(found.axes["module"]):
        for head in range(4):
            wanted = by_hand(model, batches, [path], put(..., head, slice(None)), of_tokens)
            close(found["exact_samples"][row, head], wanted)
    found = effects(zero + ", heads: 1}", "{tokens: [0, -2, '1:3'], module: each}", *padded)
    for row, places in enumerate(([0], [-2], [1, 2])):

        def edit(value: Tensor, mask: Tensor, places: list[int] = places) -> Tensor:
            value = value.clone()
            for number, real in enumerate(mask):
                value[number, real.nonzero().squeeze(1)[places], 1] = 0
            return value

        for column, path in enumerate(found.axes["module"]):
            close(found["exact_samples"][row, column], by_hand(model, batches, [path], edit, of_tokens))


def test_neighbouring_modules_are_edited_together(effects) -> None:
    mlp = ("model=mlp", *DIGITS)
    over = "{module: {window: 2}, factor: [0, 0.5]}"
    found = effects("{select: 'type:Linear', hook: forward, action: scale}", over, *mlp)
    model, batches = plain(*mlp)
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for row in range(len(paths) - 1):
        wanted = by_hand(model, batches, paths[row : row + 2], put(..., factor=0.5), of_labels)
        close(found["exact_samples"][row, 1], wanted)


MODEL = """
    import torch
    from torch import nn

    class Noted(nn.Module):
        def forward(self, x):
            self.last = x / 2
            return x

    class Listed(nn.Module):
        def forward(self, x):
            return [1] * len(x), [*x]

    class Net(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.noted, self.listed, self.act = kind, Noted(), Listed(), nn.ReLU(inplace=True)
            self.a, self.b, self.c = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
            self.mix, self.where = nn.MultiheadAttention(16, 2), nn.Embedding(4, 16)

        def forward(self, x):
            x = first = self.act(self.a(x.flatten(1)))
            x = self.b(x)
            if self.kind == "depends on the batch":
                x = x - x.mean(0)
            if self.kind == "calls a module again":
                x = self.b(torch.tanh(x)) + first
            if self.kind == "keeps a value in a module":
                x = self.b(self.noted(x)) + self.noted.last
            if self.kind == "has the batch second":
                x = x[None] * torch.arange(1, 4)[:, None, None]
                x = self.b(self.mix(x, x, x)[0]).mean(0)
            if self.kind == "branches on values" and x.sum() > 0:
                x = self.b(x)
            if self.kind == "shares a tensor among samples":
                x = x * self.b(self.where(torch.arange(4))).mean(0)
            if self.kind == "lists its samples":
                x = torch.stack(self.listed(x)[1])
            if self.kind == "writes in place":
                x = self.act(x).add_(1)
            return self.c(x)

    def build(kind):
        torch.manual_seed(0)
        return Net(kind)

    def mine(output, target):
        return output.logsumexp(-1).square()
"""


@pytest.mark.parametrize("kind", re.findall(r'self.kind == "(.*?)"', MODEL))
@pytest.mark.parametrize("pre", [False, True])
def test_cells_are_right_on_a_model_that(kind: str, pre: bool, effects, trusted) -> None:
    trusted(nets=MODEL)
    hook = "forward_pre" if pre else "forward"
    net = ("model=python", "model.factory='nets:build'", f"+model.args={{kind: {kind}}}", *DIGITS)
    over = "{factor: [0, -2.0, 0.5, 1.0], module: each}"
    found = effects(f"{{select: [a, b, c], hook: {hook}, action: scale}}", over, *net)
    model, batches = plain(*net)
    for row, factor in enumerate((0, -2.0, 0.5, 1.0)):
        for column, path in enumerate("abc"):
            wanted = by_hand(model, batches, [path], put(..., factor=factor), of_labels, pre=pre)
            close(found["exact_samples"][row, column], wanted)


def test_a_metric_is_that_of_evaluate_by_sample(effects, executed, trusted) -> None:
    trusted(nets=MODEL)
    metrics = ("accuracy", "perplexity", "kl", "rank", "nets:mine")
    at_tokens = (*DECODER, "task.tokens='-3:'")
    hook = "select: blocks.0.mlp, hook: forward, action: scale"
    by_sample = ", ".join(f'{{name: "{metric}", by: sample}}' for metric in metrics)
    single = executed(
        "task=evaluate", f"task.metrics=[{by_sample}]", f"+hooks.h={{{hook}, factor: 2}}", *at_tokens
    )
    lines = [line for line in single.metrics if line.get("of") == "sample"]
    for metric in metrics:
        found = effects(f"{{{hook}}}", "{factor: [0.0, 2.0]}", *at_tokens, metric=f'"{metric}"')
        wanted = [line[metric.rpartition(":")[2]] for line in lines]
        close(found["exact_samples"][1], torch.tensor(wanted, dtype=torch.float64))
        assert (found["unedited"] == 0) == (metric == "kl"), "of the run without hooks from itself"


def test_other_hooks_stay_as_they_are_in_each_cell(executed) -> None:
    others = (
        "+hooks.noise={select: conv2, hook: forward, action: noise, std: 0.2}",
        "+hooks.some={select: relu2, hook: forward, action: scale, factor: 3, index: '0:2, 5'}",
        "+hooks.seen={select: fc, hook: forward, action: capture}",
    )
    over = "{factor: [1.0, 0.5], index: [':, 0', ':, 3']}"
    made = executed(*words("{select: relu1, hook: forward, action: scale}", over, *DIGITS, *others))
    moved = "+hooks.h={select: relu1, hook: forward, action: scale, factor: 0.5, index: ':, 3'}"
    by_sample = "task.metrics=[{name: loss, by: sample}]"
    single = executed("task=evaluate", by_sample, moved, *DIGITS, *others)
    losses = [line["loss"] for line in single.metrics if line.get("of") == "sample"]
    close(made.effects["exact_samples"][1, 1], torch.tensor(losses, dtype=torch.float64))
    seen = executed("task=predict", *DIGITS, *others).captures["seen"]["fc"]
    torch.testing.assert_close(made.captures["seen"]["fc"][:], seen[:])


SAE = "+hooks.sae={select: flatten, hook: forward, action: sparse_autoencoder, weights: {folder: sae}, error: true}"


@pytest.fixture
def autoencoder(tmp_path: Path) -> dict[str, Tensor]:
    """The tensors of the folder `sae`."""
    shapes = {"W_enc": (512, 40), "W_dec": (40, 512), "b_enc": (40,), "b_dec": (512,)}
    w = {name: torch.randn(shape) / 8 for name, shape in shapes.items()}
    (tmp_path / "sae").mkdir()
    save_file(w, tmp_path / "sae" / "sae_weights.safetensors")
    (tmp_path / "sae" / "cfg.json").write_text('{"d_in": 512, "d_sae": 40}')
    return w


def test_features_of_an_autoencoder_are_cells(executed, autoencoder) -> None:
    w = autoencoder
    off = "{hook: forward, action: replace, value: 0, index: '..., 3'}"
    over = "{module: ['hook:sae.features', flatten], index: ['..., 3', '..., 5']}"
    found = executed(SAE, *words(off, over, *DIGITS)).effects
    assert found.axes["module"] == ["hook:sae.features", "flatten"]
    model, batches = plain(*DIGITS)
    for column, feature in enumerate([3, 5]):

        def without(x: Tensor, mask: Any, feature: int = feature) -> Tensor:
            features = torch.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
            return x - features[:, feature, None] * w["W_dec"][feature]

        close(found["exact_samples"][0, column], by_hand(model, batches, ["flatten"], without, of_labels))
        wanted = by_hand(model, batches, ["flatten"], put(slice(None), feature), of_labels)
        close(found["exact_samples"][1, column], wanted)


def test_a_circuit_is_of_all_features(executed, autoencoder) -> None:
    w = autoencoder
    off = "{select: 'hook:sae.features', hook: forward, action: replace, value: 0}"
    circuit = "task.circuit={sizes: [40, 5, 0], rest: 0}"
    over = "{index: {window: 1}}"
    found = executed(SAE, *words(off, over, *DIGITS), "task.method=gradient", circuit).effects
    rest = (found["gradient"] - found["unedited"]).abs().argsort()[:35]

    def without(x: Tensor, mask: Any) -> Tensor:
        features = torch.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        return x - features[:, rest] @ w["W_dec"][rest]

    model, batches = plain(*DIGITS)
    kept = by_hand(model, batches, ["flatten"], without, of_labels).mean()
    faithfulness = (kept - found["replaced"]) / (found["unedited"] - found["replaced"])
    close(found["circuit"], torch.stack([torch.tensor(1.0), faithfulness, torch.tensor(0.0)]))


def test_the_gradient_approximates_the_change(effects) -> None:
    hook = "{select: 'blocks.*.attn.z', hook: forward, action: replace, value: 0.1}"
    found = effects(hook, "{module: each, heads: each}", *DECODER, "task.method=gradient")
    model, batches = plain(*DECODER)
    assert "exact" not in found
    for row, path in enumerate(found.axes["module"]):
        kept: list[Tensor] = []

        def keep(module: Any, args: Any, output: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[-1].clone()

        handle = model.get_submodule(path).register_forward_hook(keep)
        estimates = []
        for batch in batches:
            losses = of_tokens(model(**batch.inputs), batch.target)
            (gradient,) = torch.autograd.grad(losses.sum(), kept[-1])
            change = ((0.1 - kept[-1].detach()) * gradient).sum((1, 3))  # [samples, heads]
            estimates.append(losses.detach()[:, None] + change)
        handle.remove()
        close(found["gradient"][row], torch.cat(estimates).mean(0))


def test_seeds_are_the_runs_with_these_seeds(effects, executed) -> None:
    noise = "select: conv1, hook: forward, action: noise, std: 0.5"
    made = effects(f"{{{noise}, seed: 4}}", "{std: [0.5, 2.0]}", *DIGITS, "task.seeds=2")
    single = executed("task=evaluate", f"+hooks.h={{{noise}, seed: 5}}", *DIGITS).metrics[-1]["loss"]
    assert made["seeds"].shape == (2, 2)
    assert float(made["seeds"][1, 0]) == pytest.approx(single, rel=1e-5)
    close(made["exact"], made["seeds"].mean(0))


def test_a_patch_restores_more_than_chance(effects, executed) -> None:
    names = (*DECODER[:2], "data=names", "data.args.val_size=6", "data.batch_size=4")
    clean = executed(
        "task=predict", *names, "+hooks.seen={select: 'blocks.*.resid_post', hook: forward, action: capture}"
    )
    value = f"{{run: {clean.path}, capture: seen, sample: same, at: same}}"
    made = effects(
        f"{{select: 'blocks.*.resid_post', hook: forward, action: replace, value: {value}}}",
        "{module: each, tokens: [1, -1]}", *names, "data.args.form=swapped", "task.tokens=-1",
        f"task.against={{run: {clean.path}}}", "task.placebo=3", metric="logit_difference",
    )  # fmt: skip
    assert made["placebo"].shape == (3, 2, 2)
    close(made["restored"][1], torch.tensor([0.0, 1.0]))
    close(made["exact"][1, 1], made["clean"])
    assert (made["placebo"][:, 1, 1] - made["exact"][1, 1]).abs().min() > 1e-4, "values of other samples"


def test_a_run_cut_off_within_a_batch_ends_equal(run, executed, monkeypatch) -> None:
    monkeypatch.setattr(cells, "SECONDS", 0.0)
    arguments = words(
        "{select: [relu1, relu2], hook: forward, action: scale, factor: 0}",
        "{module: each, index: [':, 0', ':, 1', ':, 2']}",
        *DIGITS,
        "+hooks.noise={select: conv1, hook: forward, action: noise, std: 0.2}",
        "+hooks.seen={select: fc, hook: forward, action: capture}",
    )
    whole = executed(*arguments)
    passes = iter(range(100))
    compute = cells.Cells._pass

    def killed(self: Any, *given: Any) -> None:
        if next(passes) == 3:
            raise RuntimeError("the machine is gone")
        compute(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(cells.Cells, "_pass", killed)
        with pytest.raises(AssertionError):
            run(*arguments)
    assert main(["resume=run1"]) == 0
    resumed = hookrun.open_run("run1")
    for name in ("effects.csv", "effects.safetensors"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()
    torch.testing.assert_close(
        resumed.captures["seen"]["fc"][:], whole.captures["seen"]["fc"][:], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("over", "words", "said"),
    [
        ("{factor: [0.5]}", ("task.hook=other",), "task.hook: found 'other'"),
        ("{fcator: [1]}", (), "did you mean 'factor'"),
        ("{index: {windo: [2, 2], stride: 1}}", (), "found the key 'windo': did you mean 'window'?"),
        ("{index: {stride: 1}}", (), "`window` is missing"),
        ("{factor: each}", (), "task.over.factor"),
        (
            "{index: [':, 3', ':, 200']}",
            (),
            "task.over.index: on relu1: index :, 200: index 200 is out of bounds",
        ),
        ("{module: [relu1, relu9]}", (), "relu9"),
        ("{factor: [half]}", (), "task.over.factor"),
        ("{factor: [0.5]}", ("task.seeds=3",), "task.seeds: scale draws no random numbers"),
        ("{}", (), "task.over"),
        ("{factor: [0.5]}", ("task.placebo=3",), "task.placebo"),
        ("{factor: [0.5]}", ("task.metric=accuracy", "task.method=gradient"), "task.method"),
        ("{factor: [0.5]}", ("hooks.h.hook=backward",), "task.hook"),
        ("{factor: [0.5]}", ("task.metric=accuarcy",), "did you mean 'accuracy'"),
        (
            "{factor: [0.5]}",
            (
                "+hooks.c={select: conv1, hook: forward, action: capture}",
                "+hooks.p={select: relu1, hook: forward, action: replace, value: {hook: c}}",
            ),
            "hooks.p.value: c at its module in this forward: the task leaves out parts",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_before_the_run(over, words, said, refused) -> None:
    task = ("task=effects", "task.hook=h", f"task.over={over}", "task.metric=loss")
    hook = "+hooks.h={select: relu1, hook: forward, action: scale, factor: 1}"
    assert said in refused(*task, hook, *words)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("{heads: [0, 9]}", "task.over.heads: on blocks.0.attn.z: there is no head 9 among 4"),
        ("{heads: [9]}", "task.over.heads: on blocks.0.attn.z: there is no head 9 among 4"),
        (
            "{module: each, heads: [[0, 1], [3, -5]]}",
            "task.over.heads: on blocks.1.attn.z: there is no head -5",
        ),
        ("{tokens: [0, 7]}", "task.over.tokens: the shortest sample has 7 tokens and no position 7"),
        ("{tokens: [-1, '3:9']}", "task.over.tokens: the shortest sample has 7 tokens and no position 9"),
        ("{tokens: [{span: third}]}", "task.over.tokens: the data 'repeated_tokens' has no span 'third'"),
        ("{module: [blocks.7.attn.z]}", "task.over.module"),
    ],
)
def test_every_cell_is_checked_before_the_first(over, said, refused) -> None:
    hook = "{select: '**.attn.z', hook: forward, action: replace, value: 0}"
    assert said in refused(*words(hook, over, *DECODER))


def test_a_sample_may_lack_positions_on_request(effects) -> None:
    hook = "{select: blocks.0, hook: forward, action: replace, value: 0}"
    found = effects(hook, "{tokens: [4, {position: 8, missing: skip}]}", *DECODER)
    assert (found["exact_samples"][1] == found["unedited_samples"]).sum() in range(1, 11)
    assert not (found["exact_samples"][0] == found["unedited_samples"]).any()


@pytest.mark.parametrize(("over", "paths"), [("[fc, layers.1]", ["fc", "layers.1"]), ("each", None)])
def test_the_moved_hook_needs_no_select(over: str, paths: list[str] | None, effects) -> None:
    mlp = ("model=mlp", *DIGITS)
    found = effects("{hook: forward, action: scale, factor: 0.5}", f"{{module: {over}}}", *mlp)
    model, batches = plain(*mlp)
    paths = paths or [path for path, each in model.named_modules() if not isinstance(each, nn.ModuleList)]
    assert found.axes["module"] == paths
    for row, path in enumerate(paths):
        close(found["exact_samples"][row], by_hand(model, batches, [path], put(..., factor=0.5), of_labels))


def test_a_mistake_of_the_task_alone_is_told(refused) -> None:
    over = "{module: [fc], factor: [0, 1]}"
    said = refused(*words("{hook: forward, action: scale}", over, "model=mlp", *DIGITS, "task.seeds=0"))
    assert "1 configuration error\n  task.seeds" in said


def test_the_page_has_maps_with_links_to_samples(executed) -> None:
    hook = "{select: [relu1, relu2], hook: forward, action: replace, value: 0}"
    over = "{module: each, index: [':, 0', ':, 1']}"
    made = executed(*words(hook, over, *DIGITS, "task.method=[exact, gradient]"))
    page = write_report(made.path).read_text()
    assert 'id="effects"' in page
    assert "correlation with the exact values" in page
    assert 'href="#cell-0"' in page
    assert 'id="cell-0"' in page
    assert len(page) < 400_000


def test_the_page_draws_changes_with_a_sign(executed) -> None:
    hook = "{select: relu1, hook: forward, action: scale}"
    made = executed(*words(hook, "{factor: [1, 0, 0.0]}", *DIGITS, "task.method=[exact, gradient]"))
    found = made.effects
    change = float(found["exact"][1] - found["unedited"])
    page = write_report(made.path).read_text()
    assert f"Without the hook the loss is <b>{float(found['unedited']):.4g}</b>" in page
    sign = "+" if change > 0 else "−"
    assert f"<b>largest {sign}{abs(change):.4g} at 0, tied with 1 other</b>" in page
    assert f'<td class="n">{sign}{abs(change):.4g} ± ' in page
    assert "0: as without the hook" in page
    assert f'<td class="token">{change:.4g}</td>' in page


@pytest.mark.usefixtures("pages")
def test_cells_without_a_finite_metric_are_told(run, capsys) -> None:
    hook = "{select: relu1, hook: forward, action: scale}"
    larger = "+hooks.larger={select: relu2, hook: forward, action: scale, factor: 1e4}"
    seen = "+hooks.seen={select: fc, hook: forward, action: stats}"
    made = run(*words(hook, "{factor: [1, 3e38]}", *DIGITS, larger, seen))
    assert made.effects.faults == ["factor=3e+38: loss (exact) is NaN or infinite for 15 samples"]
    said = capsys.readouterr().out
    page = (made.path / "report.html").read_text()
    assert made.effects.faults[0] in said
    assert f'<li class="mono">{made.effects.faults[0]}' in page
    assert "seen: in the pass without h only" in said


def test_effects_that_differ_are_a_difference_of_the_runs(executed) -> None:
    over = "{module: [relu1], index: [0, 1]}"
    hook = "{select: relu1, hook: forward, action: replace, value: %s}"
    one = executed(*words(hook % 0, over, *DIGITS))
    other = executed(*words(hook % 5, over, *DIGITS))
    assert one.compare(shutil.copytree(one.path, "copy")).reasons == []
    assert one.compare(other).reasons == ["metrics that differ: 2"]


def words(hook: str, over: str, *overrides: str, metric: str = "loss") -> tuple[str, ...]:
    """The command line of task=effects with a hook called `h`."""
    task = ("task=effects", "task.hook=h", f"task.over={over}", f"task.metric={metric}")
    return (*task, f"+hooks.h={hook}", *overrides)


def plain(*overrides: str) -> tuple[nn.Module, Any]:
    """The model of these overrides, and its batches."""
    model, data = hookrun.build(overrides=["compute.device=cpu", *overrides])
    return model.eval(), data.loader("val")


@torch.no_grad()
def by_hand(
    model: nn.Module,
    batches: Any,
    paths: Sequence[str],
    edit: Callable[[Tensor, Tensor], Tensor],
    metric: Callable[[Any, Tensor], Tensor],
    *,
    pre: bool = False,
) -> Tensor:
    """[samples]: the metric with the edit at these modules, one plain pass over the batches; edit: (value, mask)."""
    values = []
    for batch in batches:
        named = isinstance(batch.inputs, Mapping)
        ids = batch.inputs["input_ids"] if named else None
        mask = torch.ones_like(ids) if named and "attention_mask" not in batch.inputs else None
        mask = batch.inputs["attention_mask"] if named and mask is None else mask
        handles = []
        for path in paths:
            module = model.get_submodule(path)
            if pre:
                hook = lambda m, args, mask=mask: (edit(args[0], mask), *args[1:])  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook))
            else:
                handles.append(module.register_forward_hook(lambda m, a, out, mask=mask: edit(out, mask)))
        values.append(metric(model(**batch.inputs) if named else model(batch.inputs), batch.target))
        for handle in handles:
            handle.remove()
    return torch.cat(values).double()


def of_labels(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return losses.sum(1) / (target != -100).sum(1)


def put(*index: Any, factor: float = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """An edit that multiplies a part of the value."""

    def edit(value: Tensor, mask: Tensor) -> Tensor:
        value = value.clone()
        value[index] *= factor
        return value

    return edit


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-5)
