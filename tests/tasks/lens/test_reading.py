"""Logits of parts: whole streams end at the model's own output, contributions sum to it, in blocks of any size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed_decoders import ROWS, decoder, edit, observed, places_of, structure_of
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.lens import reading
from hookrun.tasks.lens.reading import Lens, PartRead, ScoredPositions, cap_of

ASKED = ScoredPositions(ROWS, torch.tensor([7, -100, 2]), torch.tensor([1, -100, -100]))


def read(
    model: nn.Module, parts: str = "residual", *, frozen: bool = False, top: int = 3, **hooks: Any
) -> tuple[dict[tuple[str, int | None], PartRead], Tensor]:
    """(name, head) -> its reading, and the model's logits [3, V] after the hooks."""
    places = places_of(model)
    seen, output = observed(model, places, inside=parts != "residual", **hooks)
    structure = structure_of(model, places) if parts != "residual" else None
    lens = Lens(model, places, parts, frozen, top, edited="whole" in hooks)
    with torch.no_grad():
        found = list(lens.read(seen, output, ASKED, structure))
    return {(part.key[0], part.key[2]): part for part in found}, output[ROWS]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_stream_gives_the_models_own_logits(frozen: bool) -> None:
    found, logits = read(decoder(), frozen=frozen)
    assert list(found) == [("embed", None), ("blocks.0.resid_post", None), ("blocks.1.resid_post", None)]
    last, embedded = found["blocks.1.resid_post", None], found["embed", None]
    top = logits.softmax(-1).topk(3)
    assert torch.equal(last.top, top.indices)
    torch.testing.assert_close(last.probabilities, top.values)
    torch.testing.assert_close(last.answer_logit[[0, 2]], logits[[0, 2], [7, 2]])
    torch.testing.assert_close(last.wrong_logit[0], logits[0, 1])
    assert last.kl is not None and embedded.kl is not None
    assert last.kl.max() < 1e-6 and (embedded.kl > 1e-3).all()
    best = logits.argmax(-1)
    assert last.right[[0, 2]].tolist() == [bool(best[0] == 7), bool(best[2] == 2)]


@pytest.mark.parametrize("parts", ["layers", "heads"])
@pytest.mark.parametrize("bias", [False, True])
def test_contributions_and_the_rest_sum_to_the_logits(parts: str, bias: bool) -> None:
    model = decoder()
    if bias:
        model.unembed.bias = nn.Parameter(torch.arange(20.0))
    hooks = {
        "mlp": edit("blocks.0.mlp"),
        "after": edit("ln_final"),
        "scores": edit("unembed", factor=-1),
        "whole": edit("", factor=3),
    }
    for some in ({}, hooks):
        found, logits = read(model, parts, frozen=True, **some)
        total = torch.stack([part.answer_logit for part in found.values()]).sum(0)
        torch.testing.assert_close(total[[0, 2]], logits[[0, 2], [7, 2]], rtol=1e-4, atol=1e-4)
        assert (("(rest)", None) in found) == bool(some)
        assert all(part.kl is None for part in found.values())


def test_blocks_of_positions_do_not_change_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts, frozen in (("residual", False), ("residual", True), ("heads", True)):
        whole, _ = read(decoder(), parts, frozen=frozen, after=edit("unembed"))
        with monkeypatch.context() as patch:
            patch.setattr(reading, "AT_ONCE", 1)
            one, _ = read(decoder(), parts, frozen=frozen, after=edit("unembed"))
        for key, part in whole.items():
            for name in ("top", "right"):
                assert torch.equal(getattr(part, name), getattr(one[key], name)), (key, name)
            for name in ("probabilities", "answer_logit", "wrong_logit"):
                torch.testing.assert_close(getattr(part, name), getattr(one[key], name))


def test_no_token_or_more_than_there_are_may_be_asked_for() -> None:
    for top, width in ((0, 0), (50, 20)):
        found, _ = read(decoder(), top=top)
        assert found["embed", None].top.shape == (3, width)


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


def test_a_factor_and_a_cap_on_the_logits_are_those_of_the_config() -> None:
    for frozen in (False, True):
        found, logits = read(Capped(), frozen=frozen)
        torch.testing.assert_close(found["inner.blocks.1.resid_post", None].answer_logit[0], logits[0, 7])
    found, logits = read(Capped(), "layers", frozen=True)
    total = torch.stack([part.answer_logit for part in found.values()]).sum(0)
    torch.testing.assert_close(total[0], torch.atanh(logits[0, 7] / 2) * 2, rtol=1e-3, atol=1e-4)
    assert cap_of(Capped()) == 2.0 and cap_of(Capped(cap=None)) is None and cap_of(decoder()) is None
    with pytest.raises(HookrunError, match=r"changes the output of inner\.unembed before it returns it"):
        read(Capped(told=False))
    with pytest.raises(HookrunError, match="a hook changes the model's output after the soft cap"):
        read(Capped(), "layers", frozen=True, whole=edit("", factor=3))
