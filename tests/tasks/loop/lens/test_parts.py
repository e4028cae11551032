"""The parts of a forward add up to the final stream, each under the name of what adds it, or the run fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from observed_decoders import decoder, edit, observed, places_of
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.loop.lens.parts import StreamPart, contributions, residual


def parts_of(model: nn.Module, *, by_head: bool = False, **hooks: Any) -> tuple[list[StreamPart], Any]:
    places = places_of(model)
    seen, _ = observed(model, places, **hooks)
    return list(contributions(model, places, seen, by_head=by_head)), seen


def total(parts: Iterable[StreamPart]) -> Tensor:
    return torch.stack([part.rows for part in parts if not part.after]).sum(0)


def test_the_residual_stream_is_read_after_the_embedding_and_each_block() -> None:
    model = decoder()
    seen, _ = observed(model, inside=False)
    found = list(residual(model, places_of(model), seen))
    assert [(part.name, part.layer) for part in found] == [
        ("embed", None), ("blocks.0.resid_post", 0), ("blocks.1.resid_post", 1)
    ]  # fmt: skip
    assert torch.equal(found[-1].rows, seen.norm_entered_before)


@pytest.mark.cases("args", [{}, {"mlp": False}, {"positions": "rotary"}])
@pytest.mark.cases("by_head", [False, True])
def test_contributions_add_up_to_what_enters_the_final_norm(args: dict[str, Any], by_head: bool) -> None:
    model = decoder(**args)
    found, seen = parts_of(model, by_head=by_head)
    torch.testing.assert_close(total(found), seen.norm.entered)
    names = {part.name for part in found}
    learned = {"pos_embed"} if model.pos_embed is not None else set()
    mlps = {"blocks.0.mlp", "blocks.1.mlp"} if args.get("mlp", True) else set()
    biases = {f"blocks.{n}.attn.out.bias" for n in (0, 1)} if by_head else set()
    assert names == {"embed", "blocks.0.attn", "blocks.1.attn", *learned, *mlps, *biases}
    heads = [(part.layer, part.head) for part in found if part.head is not None]
    assert heads == ([(0, 0), (0, 1), (1, 0), (1, 1)] if by_head else [])


def test_what_hooks_change_is_a_part_of_its_own_where_they_change_it() -> None:
    hooks = {
        "block": edit("blocks.0"),
        "entering": edit("blocks.1", "forward_pre", target="[0]"),
        "mid": edit("blocks.1.resid_mid"),
        "out": edit("blocks.1.attn.out"),
        "mlp": edit("blocks.1.mlp"),
        "normed": edit("ln_final", "forward_pre"),
        "after": edit("ln_final"),
    }
    for by_head in (False, True):
        found, seen = parts_of(decoder(), by_head=by_head, **hooks)
        torch.testing.assert_close(total(found), seen.norm.entered)
        of_hooks = [part.name for part in found if "(hooks)" in part.name]
        out = ["blocks.1.attn (hooks)"] if by_head else []
        blocks = ["blocks.0 (hooks)", *out, "blocks.1 (hooks)"]
        assert of_hooks == [*blocks, "ln_final (hooks)", "unembed (hooks)"]
        (last,) = (part for part in found if part.after)
        torch.testing.assert_close(last.rows, seen.norm.after - seen.norm.before)
    unchanged, _ = parts_of(decoder(), same=edit("blocks.0", factor=1))
    assert not any("(hooks)" in part.name for part in unchanged)


def test_a_contribution_that_the_model_scales_is_scaled() -> None:
    class Scaled(nn.Module):
        residual_multiplier = 0.25

        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(8, 8)

        def forward(self, x: Tensor, *args: Any) -> Tensor:
            return x + self.attn(x) * 0.25

    model, places = decoder(), places_of(decoder(), heads=())
    seen, _ = observed(model, places)
    seen.embedded["embed"] *= 2  # as if the model divided it by two
    whole, *_ = found = list(contributions(model, places, seen, by_head=False))
    assert whole.name == "embed" and "pos_embed" not in {part.name for part in found}
    torch.testing.assert_close(total(found), seen.norm.entered)
    model.blocks[1] = Scaled()
    seen, _ = observed(model, places)
    found = list(contributions(model, places, seen, by_head=False))
    torch.testing.assert_close(total(found), seen.norm.entered)
    Scaled.residual_multiplier = 1.0
    with pytest.raises(
        HookrunError, match=r"blocks.1: its parts \(blocks.1.attn\) do not add up to its output"
    ):
        list(contributions(model, places, seen, by_head=False))


def test_a_stream_that_is_changed_between_the_blocks_or_a_number_that_is_not_one_is_refused() -> None:
    model, places = decoder(), places_of(decoder())
    for at, name, said in (
        (lambda seen: seen.blocks[1], "entered_before", "blocks.1: its input is not the output of the block"),
        (lambda seen: seen, "norm_entered_before", "ln_final: its input is not the output of the last block"),
        (lambda seen: seen, "unembed_entered_before", "unembed: its input is not the output of ln_final"),
        (lambda seen: seen.blocks[0], "left_before", "do not add up to its output: they differ by nan"),
    ):
        seen, _ = observed(model, places)
        off = torch.nan if "nan" in said else 1
        setattr(at(seen), name, getattr(at(seen), name) + off)
        with pytest.raises(HookrunError, match=said):
            list(contributions(model, places, seen, by_head=False))
