"""A forward of a decoder is read and split into parts; their logits, means over a pass, and the lines of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed_decoders import IDS, ROWS, decoder, edit, observed, places_of, sources_of
from torch import Tensor, nn

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.studies.lens import reading
from hookrun.studies.lens.contributions import Observer, Part, PartRows, Source, contributions, find_sources
from hookrun.studies.lens.reading import Lens, PartMeans, Reading, ScoredPositions, cap_of


def parts_of(
    model: nn.Module, *, by_head: bool = False, **hooks: Any
) -> tuple[list[PartRows], dict[str, Tensor]]:
    places = places_of(model) if by_head else places_of(model, heads=())
    seen, _ = observed(model, places, **hooks)
    return list(contributions(model, places, sources_of(model, places), seen)), seen.inputs


def total(parts: Iterable[PartRows]) -> Tensor:
    return torch.stack([rows for _, rows in parts]).sum(0)


def test_rows_are_copies_that_a_later_change_in_place_spares() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            return x.mul_(2)

    model = decoder()
    model.blocks[1] = InPlace()
    seen, _ = observed(model, places_of(decoder(), heads=()))
    assert torch.equal(seen.outputs["blocks.1"], 2 * seen.outputs["blocks.0"])


def test_a_model_in_inference_mode_is_observed_alike() -> None:
    model = decoder()
    expected, _ = observed(model)
    model.forward = torch.inference_mode()(model.forward)
    seen, _ = observed(model)
    for path, rows in seen.outputs.items():
        assert torch.equal(rows, expected.outputs[path])


def test_nothing_is_seen_outside_of_observe() -> None:
    model = decoder()

    def hooks() -> int:
        return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())

    observer = Observer(model, places_of(model), inside=True)
    with pytest.raises(HookrunError, match=r"the blocks ran as \[\]"), observer.installation:
        model(IDS)
        assert hooks() > 0
        observer.observe(lambda: None, ROWS, (2, 4))
    assert hooks() == 0


@pytest.mark.parametrize(("given", "said"), [
    ({"blocks": ("blocks.1", "blocks.0")}, r"ran as \['blocks.0', 'blocks.1'\], expected"),
    ({"final_norm": "blocks.0.attn.scores"}, "blocks.0.attn.scores did not return"),
    ({"blocks": ("blocks.0.attn.scores",)}, "does not pass a tensor"),
])  # fmt: skip
def test_a_model_that_runs_otherwise_is_refused(given: dict[str, Any], said: str) -> None:
    model = decoder()
    with pytest.raises(HookrunError, match=said):
        observed(model, places_of(model, heads=(), **given))


@pytest.mark.parametrize("args", [{}, {"mlp": False}, {"positions": "rotary"}])
@pytest.mark.parametrize("by_head", [False, True])
def test_contributions_add_up_to_the_input_of_the_final_norm(args: dict[str, Any], by_head: bool) -> None:
    model = decoder(**args)
    found, inputs = parts_of(model, by_head=by_head)
    torch.testing.assert_close(total(found), inputs["ln_final"])
    names = {part.name for part, _ in found}
    learned = {"pos_embed"} if model.pos_embed is not None else set()
    mlps = {"blocks.0.mlp", "blocks.1.mlp"} if args.get("mlp", True) else set()
    biases = {f"blocks.{n}.attn.out.bias" for n in (0, 1)} if by_head else set()
    assert names == {"embed", "blocks.0.attn", "blocks.1.attn", *learned, *mlps, *biases}
    heads = [(part.layer, part.head) for part, _ in found if part.head is not None]
    assert heads == ([(0, 0), (0, 1), (1, 0), (1, 1)] if by_head else [])


class Scaled(nn.Module):
    """A block that scales what it adds, as Granite's do."""

    def __init__(self, told: float) -> None:
        super().__init__()
        self.attn, self.residual_multiplier = nn.Linear(8, 8), told

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x + self.attn(x) * 0.25


@pytest.mark.parametrize(("told", "name"), [(0.25, "blocks.1.attn"), (1.0, "blocks.1")])
def test_a_block_that_scales_otherwise_than_it_says_is_one_part(told: float, name: str) -> None:
    model = decoder()
    places = places_of(decoder(), heads=())
    model.blocks[1] = Scaled(told)
    seen, _ = observed(model, places)
    found = list(contributions(model, places, sources_of(model, places), seen))
    torch.testing.assert_close(total(found), seen.inputs["ln_final"])
    assert found[-1][0].name == name


def test_embeddings_that_do_not_add_up_are_one_part() -> None:
    model = decoder()
    places = places_of(decoder(), heads=())
    seen, _ = observed(model, places)
    seen.outputs["embed"] *= 2  # as if the model divided it by two
    sources = find_sources(model, places, seen, ["embed", "pos_embed"])
    assert sources[0] == Source(Part("embed"))
    (first, rows), *_ = contributions(model, places, sources, seen)
    assert first.name == "embed"
    assert torch.equal(rows, seen.inputs["blocks.0"])


def test_heads_that_no_block_adds_are_refused() -> None:
    model = decoder()
    places = places_of(decoder())
    model.blocks[1].residual_multiplier = 0.5
    with pytest.raises(HookrunError, match=r"task.heads: blocks.1.attn.out is not part"):
        sources_of(model, places)


ASKED = ScoredPositions(ROWS, torch.tensor([7, -100, 2]), torch.tensor([1, -100, -100]))


def read(
    model: nn.Module, parts: str = "residual", *, frozen: bool = False, top: int = 3, **hooks: Any
) -> tuple[dict[tuple[str, int | None], Reading], Tensor]:
    """(name, head) -> its reading, and the model's logits [3, V] after the hooks."""
    places = places_of(model)
    seen, output = observed(model, places, inside=parts != "residual", **hooks)
    sources = sources_of(model, places) if parts != "residual" else None
    lens = Lens(model, places, parts, frozen, top, edited="whole" in hooks)
    with torch.no_grad():
        found = lens.read(seen, output, ASKED, sources)
    return {(part.name, part.head): read for part, read in found.items() if part is not None}, output[ROWS]


def test_blocks_of_positions_do_not_change_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts, frozen in (("residual", False), ("residual", True), ("heads", True)):
        whole, _ = read(decoder(), parts, frozen=frozen, after=edit("unembed"))
        with monkeypatch.context() as patch:
            patch.setattr(reading, "AT_ONCE", 1)
            one, _ = read(decoder(), parts, frozen=frozen, after=edit("unembed"))
        for key, part in whole.items():
            for name in ("top", "right"):
                assert torch.equal(part[name], one[key][name]), (key, name)
            for name in ("probabilities", "answer_logit", "wrong_logit"):
                torch.testing.assert_close(part[name], one[key][name])


def test_no_token_or_more_than_there_are_may_be_asked_for() -> None:
    for top, width in ((0, 0), (50, 20)):
        found, _ = read(decoder(), top=top)
        assert found["embed", None]["top"].shape == (3, width)


class Capped(nn.Module):
    """A decoder that scales its logits and bounds them."""

    def __init__(self, scale: float = 0.5, cap: float | None = 2.0, told: bool = True) -> None:
        super().__init__()
        self.inner, self.scale, self.cap = decoder(), scale, cap
        self.config = SimpleNamespace(
            num_hidden_layers=2, num_attention_heads=2, logits_scaling=1 / scale, final_logit_softcapping=cap
        )
        if not told:
            self.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)
        self.get_output_embeddings = lambda: self.inner.unembed

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.inner(ids) * self.scale
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


def test_a_cap_on_the_logits_is_that_of_the_config() -> None:
    for frozen in (False, True):
        found, logits = read(Capped(), frozen=frozen)
        torch.testing.assert_close(found["inner.blocks.1.resid_post", None]["answer_logit"][0], logits[0, 7])
    found, logits = read(Capped(), "layers", frozen=True)
    total = torch.stack([part["answer_logit"] for part in found.values()]).sum(0)
    torch.testing.assert_close(total[0], torch.atanh(logits[0, 7] / 2) * 2, rtol=1e-3, atol=1e-4)
    assert cap_of(Capped()) == 2.0
    assert cap_of(Capped(cap=None)) is None
    assert cap_of(decoder()) is None
    with pytest.raises(HookrunError, match=r"changes the output of inner\.unembed before it returns it"):
        read(Capped(told=False))
    with pytest.raises(HookrunError, match="a hook changes the model's output after the soft cap"):
        read(Capped(), "layers", frozen=True, whole=edit("", factor=3))


FOUR = torch.zeros(4, dtype=torch.int64), torch.arange(4)
READ_AT = ScoredPositions(FOUR, torch.tensor([5, IGNORED, 6, 7]), torch.tensor([8, IGNORED, IGNORED, 9]))


A = Part("a", 0)
A_HEAD = Part("a", 0, 1)
B = Part("b", 0)


def read_at_four(*, kl: bool = True, factor: float = 1.0) -> Reading:
    """A part at four positions, at the first of which the most probable token is the answer."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0]) * factor
    top = torch.arange(8).reshape(4, 2)
    read = {"top": top, "probabilities": top / 10, "answer_logit": numbers, "wrong_logit": numbers / 2}
    read["right"] = torch.tensor([True, True, False, False])
    return {**read, "kl": numbers / 10} if kl else read


def test_means_leave_out_positions_without_an_answer() -> None:
    means = PartMeans()
    means.add(A, read_at_four(), READ_AT)
    means.add(None, read_at_four(factor=10, kl=False), READ_AT)
    counts = [means.sums[A][name] for name in ("positions", "answers", "pairs")]
    assert counts == [4, 3, 2]
    expected = {"kl": 0.25, "accuracy": 1 / 3, "answer_logit": 8 / 3, "logit_difference": 1.25}
    assert means.means(A) == pytest.approx(expected)
    assert means.means(None, ["answer_logit"])["answer_logit"] == pytest.approx(80 / 3)


def test_a_part_missing_in_a_batch_counts_as_nothing() -> None:
    means = PartMeans()
    for keys in ((None, A), (None, A, A_HEAD, B)):
        for key in keys:
            means.add(key, read_at_four(), READ_AT)
    for name in ("kl", "accuracy", "answer_logit", "logit_difference"):
        assert means.means(A)[name] == 2 * means.means(B)[name], name
    lines = list(means.lines("heads"))
    for line in lines:
        assert "kl" not in line
        assert "accuracy" not in line
    assert [(line["module"], line.get("head"), line["positions"]) for line in lines] == [
        ("a", None, 8), ("a", 1, 4), ("b", None, 4)
    ]  # fmt: skip
