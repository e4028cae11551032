"""task=attribute: the methods equal their formulas, written by hand, under the experiment's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.errors import HookrunError
from hookrun.run.passes.batches import Batches
from hookrun.studies.attribute import attributing
from hookrun.studies.attribute.attributing import AttributionRows

FEW = ("task=attribute", "data.batch_size=5", "train.limit_batches=2")
NET = """
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        x -= 0.1
        x = self.relu(x)
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.conv2(x)
        y += x
        return self.head(self.relu(y).mean((2, 3)))
"""
"""It writes into its inputs, and into the outputs of layers."""


@pytest.fixture
def parts(ready) -> Callable[..., tuple[Any, Tensor, Tensor]]:
    """The model in evaluation mode, the samples and the labels."""

    def parts(*overrides: str) -> tuple[Any, Tensor, Tensor]:
        prepared = ready(*FEW, *overrides)
        batches = list(Batches(prepared, "val").epoch(0))
        inputs = torch.cat([batch.inputs for batch in batches])
        target = torch.cat([batch.target for batch in batches])
        return prepared.model.eval(), inputs, target

    return parts


def of_class(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


# The other scores are those of `task.backward`.
SCORES = {
    "top": lambda logits, labels, top: of_class(logits, top),
    "loss": lambda logits, labels, top: F.cross_entropy(logits, labels, reduction="none"),
}


@pytest.mark.parametrize("score", SCORES)
def test_integrated_gradients_add_up_to_the_scores(executed, own_model, parts, score: str) -> None:
    own = own_model(NET)
    found = executed(*FEW, *own, f"task.score={score}", "task.steps=20", "task.baseline=0.3").attributions
    model, images, labels = parts(*own)
    top = by_hand(model, images, {}).argmax(1)
    total = torch.zeros_like(images)
    for node, weight in zip(*np.polynomial.legendre.leggauss(20), strict=True):
        x = (0.3 + (1 + node) / 2 * (images - 0.3)).float().requires_grad_()
        scores = SCORES[score](by_hand(model, x, {}), labels, top)
        total += torch.autograd.grad(scores.sum(), x)[0] * weight / 2
    torch.testing.assert_close(found["attributions"], total * (images - 0.3), rtol=1e-4, atol=1e-6)
    ends = [SCORES[score](by_hand(model, x, {}), labels, top) for x in (images, torch.full_like(images, 0.3))]
    torch.testing.assert_close(found["scores"], ends[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found["delta"], total.mul(images - 0.3).flatten(1).sum(1) - (ends[0] - ends[1]), rtol=1e-3, atol=1e-6
    )
    assert found["delta"].abs().max() < 0.1 * (ends[0] - ends[1]).abs().max()
    assert found["sample_ids"].tolist() == list(range(10))


@pytest.mark.parametrize("layer", ["bn1", "conv2"])
def test_grad_cam_weights_channels_by_their_mean_gradients(executed, own_model, parts, layer: str) -> None:
    own = own_model(NET)
    found = executed(*FEW, *own, "task.method=grad_cam", f"task.select={layer}").attributions["attributions"]
    model, images, labels = parts(*own)
    at: dict[str, Tensor] = {}
    scores = of_class(by_hand(model, images, at), labels)
    (gradient,) = torch.autograd.grad(scores.sum(), at[layer])
    expected = (gradient.mean((2, 3), keepdim=True) * at[layer]).sum(1, keepdim=True)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-7)


class Guided(torch.autograd.Function):
    """A ReLU that passes back what is positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(min=0) * (ctx.saved_tensors[0] > 0)


def test_guided_backprop_works_with_relus_in_place(executed, own_model, parts) -> None:
    own = own_model(NET)
    found = executed(*FEW, *own, "task.method=guided_backprop").attributions["attributions"]
    model, images, labels = parts(*own)
    images.requires_grad_()
    scores = of_class(by_hand(model, images, {}, Guided.apply), labels)
    expected = torch.autograd.grad(scores.sum(), images)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    usual = of_class(by_hand(model, images, {}), labels)
    assert not torch.allclose(found, torch.autograd.grad(usual.sum(), images)[0])


def test_guided_backprop_refuses_relus_that_are_functions(fails, refused, own_model) -> None:
    own = own_model(NET.replace("self.head(self.relu(y)", "self.head(torch.relu(y)"))
    said = fails(*FEW, *own, "task.method=guided_backprop")
    assert "1 of the 3 ReLUs that the model computes are functions" in said
    without = ("model=decoder", "data=names", "task.score=logit_difference", "task.method=guided_backprop")
    assert "the model has no such module" in refused("task=attribute", *without)


def test_hooks_record_the_unchanged_samples_once(executed, hook) -> None:
    see = "+hooks.seen={select: conv1, hook: forward, action: capture}"
    half = executed(*FEW, see, hook(select="fc", hook="forward", action="scale", factor=0.5))
    whole = executed(*FEW).attributions["attributions"]
    torch.testing.assert_close(2 * half.attributions["attributions"], whole)
    assert half.captures["seen"]["conv1"].sample_ids.tolist() == list(range(10))
    noisy = executed(*FEW, "task.steps=200", hook(select="conv1", hook="forward", action="noise", std=0.1))
    assert noisy.attributions["delta"].abs().max() < 0.01, "every pass has the noise of the unchanged sample"


@pytest.mark.parametrize("padding", ["left", "right"])
def test_attributions_of_tokens_are_those_of_each_sequence_alone(executed, ready, padding: str) -> None:
    data = ("data=repeated_tokens", "data.args.half=[3,5]", f"data.args.padding={padding}", "model=decoder")
    score = ("task.score={score: class, class: 2}", "task.tokens=-1", "task.steps=8")
    found = executed(
        "task=attribute", *data, *score, "data.batch_size=4", "train.limit_batches=1"
    ).attributions
    prepared = ready("task=evaluate", *data, "data.batch_size=4")
    (batch, *_) = Batches(prepared, "val").epoch(0)
    model = prepared.model.eval()
    ids = batch.inputs["input_ids"]
    mask = batch.inputs["attention_mask"]
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    for row in range(4):
        tokens = ids[row][mask[row] != 0][None]
        embedded = embedding(tokens).detach()
        total = 0
        for node, weight in zip(*np.polynomial.legendre.leggauss(8), strict=True):
            leaf = (embedded * (1 + node) / 2).float().requires_grad_()
            handle = embedding.register_forward_hook(lambda *_, leaf=leaf: leaf)
            output = model(tokens)
            handle.remove()
            logits = output if isinstance(output, Tensor) else output.logits
            total = total + torch.autograd.grad(logits[0, -1, 2], leaf)[0] * weight / 2
        expected = (total * embedded).sum(-1)[0]
        values = found["attributions"][row]
        torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-3, atol=1e-6)
        assert not values[len(expected) :].any()


def test_functions_of_ones_own_are_scores(executed, trusted) -> None:
    names = ("model=decoder", "data=names", "data.batch_size=4", "train.limit_batches=1", "task.steps=5")
    found = executed("task=attribute", *names, "task.score=logit_difference")
    metric = executed("task=evaluate", *names[:4], "task.metrics=[logit_difference]").metrics[-1][
        "logit_difference"
    ]
    assert found.metrics[-1]["score"] == pytest.approx(metric, abs=1e-5)
    trusted(own_scores="def third(output, target):\n    return output[:, 3].mean()\n")
    own = executed(*FEW, "task.score='own_scores:third'").attributions
    third = executed(*FEW, "task.score={score: class, class: 3}").attributions
    torch.testing.assert_close(own["attributions"], third["attributions"])


NO_GRADIENT = {
    "    self.inside(x)\n    return self.head(x[:, 0, 0])\n": "the score does not depend on inside",
    "    with torch.no_grad():\n        y = self.inside(x)\n    return self.head(y[:, 0, 0])\n": "does not depend",
    "    return self.head(self.inside(x[:, 0].transpose(0, 1)).mean(0))\n": "is not the samples",
}


def test_what_a_method_cannot_take_is_refused(fails, refused, own_model) -> None:
    assert "needs `select`" in refused(*FEW, "task.method=grad_cam")
    assert "matches 2 modules: conv1, conv2" in refused(*FEW, "task.method=grad_cam", "task.select=conv*")
    assert "goes with `score: class`" in refused(*FEW, "task.score=class")
    assert "compute.compile" in refused(*FEW, "compute.compile=true")
    assert "found 10, and the model has 10 classes" in refused(*FEW, "task.score={score: class, class: 10}")
    for forward, said in NO_GRADIENT.items():
        body = "def __init__(self):\n    super().__init__()\n    self.inside = nn.Linear(8, 8)\n"
        own = own_model(body + f"    self.head = nn.Linear(8, 10)\ndef forward(self, x):\n{forward}")
        assert said in fails(*FEW, *own, "task.select=inside")


def test_rows_of_an_earlier_process_count_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributing, "MOST_BYTES", 1000)
    rows = AttributionRows()
    rows.load_state_dict({"sample_ids": torch.arange(10), "scores": torch.zeros(220)})
    with pytest.raises(HookrunError, match="keeps its results in memory"):
        rows.add(torch.arange(5), {"scores": torch.zeros(5)})


PATCHES = """
    def __init__(self, channels=6):
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(1, channels, 2, stride=2)
        self.norm, self.mix = nn.LayerNorm(channels), nn.Linear(channels, channels)
        self.start = nn.Parameter(torch.ones(2, channels))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.norm(self.patch(x).permute(0, 2, 3, 1))  # [B, height, width, C]
        tokens = torch.cat([self.start.expand(len(x), -1, -1), x.flatten(1, 2)], 1)
        tokens = self.mix(tokens)  # [B, 2 + height * width, C]
        return self.head(tokens.tanh().cumsum(1).square().mean(1))
"""
"""Maps with the channels last, then a sequence with two tokens before those of the picture."""


def cam(value: Tensor, gradient: Tensor) -> Tensor:
    """[B, 1, height, width] of values [B, height, width, C]."""
    return torch.einsum("bc,bhwc->bhw", gradient.mean((1, 2)), value)[:, None].detach()


def seen_at(model: nn.Module, path: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a module, and the gradient of the label's score there."""
    kept: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: kept.append(output))
    scores = of_class(model(images), labels)
    handle.remove()
    return kept[0], torch.autograd.grad(scores.sum(), kept[0])[0]


CAM = (*FEW, "task.method=grad_cam")


def test_channels_that_are_last_are_found_or_named(executed, own_model, parts, capsys) -> None:
    own = own_model(PATCHES)
    found = executed(*CAM, *own, "task.select=norm").attributions["attributions"]
    assert (
        "grad_cam: channels last in [2, 4, 4, 6], the other dimensions are places" in capsys.readouterr().out
    )
    torch.testing.assert_close(found, cam(*seen_at(parts(*own)[0], "norm", *parts(*own)[1:])))
    named = executed(*CAM, *own, "task.select=norm", "task.channels=last").attributions["attributions"]
    assert torch.equal(found, named)
    said = executed(*CAM, *own, "task.select=patch").path
    assert said.exists()
    assert "channels first" in capsys.readouterr().out


def test_the_places_of_a_sequence_are_a_grid_behind_other_tokens(executed, own_model, parts) -> None:
    own = own_model(PATCHES)
    keys = ("task.select=mix", "task.grid=[4, 4]", "task.skip_tokens=2")
    found = executed(*CAM, *own, *keys).attributions["attributions"]
    model, images, labels = parts(*own)
    value, gradient = (each[:, 2:].unflatten(1, (4, 4)) for each in seen_at(model, "mix", images, labels))
    torch.testing.assert_close(found, cam(value, gradient))


TORCHVISION = """
    import torch
    from torchvision.models import SwinTransformer, VisionTransformer

    def swin():
        torch.manual_seed(0)
        return SwinTransformer([2, 2], 12, [1, 1], [2, 2], [2, 2], num_classes=10)

    def vit():
        torch.manual_seed(0)
        model = VisionTransformer(16, 4, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=12, num_classes=10)
        torch.nn.init.normal_(model.heads.head.weight)
        return model
"""


@pytest.mark.parametrize(
    ("name", "layer", "keys", "grid"),
    [
        ("swin", "features.3", (), None),
        ("swin", "norm", (), None),
        ("vit", "encoder.layers.encoder_layer_1.ln_1", ("task.grid=[4,4]", "task.skip_tokens=1"), (4, 4)),
    ],
)
def test_torchvisions_transformers_equal_plain_pytorch(
    name, layer, keys, grid, executed, trusted, parts
) -> None:
    trusted(nets=TORCHVISION)
    pictures = ("data=fake_images", "data.args.shape=[3,16,16]", "data.args.val_size=10")
    own = ("model=python", f"model.factory=nets:{name}", *pictures, f"task.select={layer}", *keys)
    found = executed(*CAM, *own).attributions["attributions"]
    seen = seen_at(parts(*CAM, *own)[0], layer, *parts(*CAM, *own)[1:])
    value, gradient = seen if grid is None else (each[:, 1:].unflatten(1, grid) for each in seen)
    assert found.abs().max() > 0
    torch.testing.assert_close(found, cam(value, gradient), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "select"),
    [
        # a head for pictures of one size: the layer itself has run before that fails
        (
            NET.replace("nn.Linear(4, 10)", "nn.Linear(256, 10)").replace(".mean((2, 3))", ".flatten(1)"),
            "conv2",
        ),
        # of a picture of 8 by 8 one place is left
        (
            NET.replace("conv2(x)\n", "conv2(nn.functional.max_pool2d(x, 8))\n").replace("y += x", "y += 0"),
            "conv2",
        ),
    ],
)
def test_maps_of_small_pictures_are_found(body: str, select: str, ready, own_model) -> None:
    assert ready(*CAM, *own_model(body), f"task.select={select}").task.channels == "first"


SWAPPED = PATCHES.replace("self.norm(self.patch(x)", "self.norm(self.patch(x.transpose(2, 3))")
FIXED = PATCHES.replace("def forward(self, x):\n", "def forward(self, x):\n        assert x.shape[-1] == 8\n")


@pytest.mark.parametrize(
    ("body", "keys", "says"),
    [
        (PATCHES, "task.select=mix", "task.channels: .*mix returns shape [2, 18, 6]"),
        (PATCHES, "task.select=head", "head returns shape [2, 10]"),
        (SWAPPED, "task.select=norm", "no two dimensions were seen to follow height and width"),
        (FIXED, "task.select=norm", "say where its channels are (task.channels=first, or last)"),
        (
            PATCHES,
            "task.select=mix task.grid=[4,4]",
            "task.grid: .*[4, 4] with skip_tokens 0 are 16 tokens",
        ),
        (PATCHES, "task.select=norm task.grid=[2,2]", "norm returns shape [2, 4, 4, 6]"),
        (PATCHES, "task.select=mix task.skip_tokens=2", "`skip_tokens` goes with `grid`"),
        (
            PATCHES,
            "task.method=integrated_gradients task.channels=last",
            "`channels` goes with `method: grad_cam`",
        ),
        (PATCHES, "task.select=norm task.grid=[0,2]", "task.grid"),
    ],
)
def test_a_layout_that_is_not_known_is_refused_before_the_run(body, keys, says, refused, own_model) -> None:
    said = refused(*CAM, *own_model(body), *keys.split())
    for part in says.split(".*"):
        assert part in said


def test_a_score_of_skipped_tokens_alone_has_no_map(fails, own_model) -> None:
    own = own_model(PATCHES.replace("tokens.tanh().cumsum(1).square().mean(1)", "tokens[:, 0]"))
    keys = ("task.select=mix", "task.grid=[4, 4]", "task.skip_tokens=2")
    assert "the score depends on the skipped tokens of mix only" in fails(*CAM, *own, *keys)


def by_hand(
    model: Any, x: Tensor, at: dict[str, Tensor], relu: Callable[[Tensor], Tensor] = F.relu
) -> Tensor:
    """The logits of NET, without in-place operations; `at` gets the outputs of its layers."""
    at["input"] = x
    at["conv1"] = model.conv1(relu(x - 0.1))
    at["bn1"] = model.bn1(at["conv1"])
    hidden = relu(at["bn1"])
    at["conv2"] = model.conv2(hidden)
    logits: Tensor = model.head(relu(at["conv2"] + hidden).mean((2, 3)))
    return logits


def test_attributions_to_what_a_hook_adds(executed, parts, refused, tmp_path) -> None:
    torch.manual_seed(0)
    shapes = {"W_enc": (512, 24), "W_dec": (24, 512), "b_enc": (24,), "b_dec": (512,)}
    w = {name: torch.randn(shape) / 8 for name, shape in shapes.items()}
    (tmp_path / "sae").mkdir()
    save_file(w, tmp_path / "sae" / "sae_weights.safetensors")
    (tmp_path / "sae" / "cfg.json").write_text('{"d_in": 512, "d_sae": 24}')
    keys = "select: flatten, hook: forward, action: sparse_autoencoder, weights: {folder: sae}, error: true"
    found = executed(*FEW, f"+hooks.sae={{{keys}}}", "task.select='hook:sae.features'").attributions
    model, images, labels = parts()
    kept: list[Tensor] = []
    model.flatten.register_forward_hook(lambda module, args, value: kept.append(value))
    with torch.no_grad():
        model(images)
    features = torch.relu((kept[0] - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
    error = kept[0] - features @ w["W_dec"]
    model.flatten.register_forward_hook(lambda module, args, value: error + line @ w["W_dec"])
    total = torch.zeros_like(features)
    nodes, weights = np.polynomial.legendre.leggauss(50)
    for node, weight in zip(nodes, weights, strict=True):
        line = (features * (1 + node) / 2).requires_grad_()
        (gradient,) = torch.autograd.grad(of_class(model(images), labels).sum(), line)
        total += gradient * weight / 2
    torch.testing.assert_close(found["attributions"], total * features, rtol=1e-4, atol=1e-6)
    said = refused(*FEW, f"+hooks.sae={{{keys}}}", "task.select='hook:sae.feature'")
    assert "did you mean 'hook:sae.features'" in said
    said = refused(*FEW, f"+hooks.sae={{{keys}}}", "task.select='hook:sae.error'", "task.method=grad_cam")
    assert "is what a hook adds" in said
