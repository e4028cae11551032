"""A forward of a decoder is read as hooks by hand see it, and split into parts that add up to the final stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from observed_decoders import IDS, decoder, edit, observed, places_of, sources_of
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.lens.contributions import Observer, Part, PartRows, Source, contributions, find_sources


def parts_of(
    model: nn.Module, *, by_head: bool = False, **hooks: Any
) -> tuple[list[PartRows], dict[str, Tensor]]:
    places = places_of(model) if by_head else places_of(model, heads=())
    seen, _ = observed(model, places, **hooks)
    return list(contributions(model, places, sources_of(model, places), seen)), seen.inputs


def total(parts: Iterable[PartRows]) -> Tensor:
    return torch.stack([rows for _, rows in parts]).sum(0)


def test_values_are_read_after_the_hooks_of_the_experiment() -> None:
    model = decoder()
    plain, _ = observed(model)
    seen, output = observed(model, block=edit("blocks.0"), into=edit("ln_final", "forward_pre"), all=edit(""))
    assert torch.equal(seen.outputs["blocks.0"], 2 * plain.outputs["blocks.0"])
    assert torch.equal(seen.inputs["ln_final"], 2 * seen.outputs["blocks.1"])
    assert torch.equal(output, 2 * seen.scores)


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
    assert all(torch.equal(rows, expected.outputs[path]) for path, rows in seen.outputs.items())


def test_hooks_are_removed_and_nothing_is_seen_before_begin() -> None:
    model = decoder()

    def hooks() -> int:
        return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())

    observer = Observer(model, places_of(model), inside=True)
    with pytest.raises(HookrunError, match=r"the blocks ran as \[\]"), observer.installation:
        model(IDS)
        assert hooks() > 0
        observer.end()
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
    model, places = decoder(), places_of(decoder(), heads=())
    model.blocks[1] = Scaled(told)
    seen, _ = observed(model, places)
    found = list(contributions(model, places, sources_of(model, places), seen))
    torch.testing.assert_close(total(found), seen.inputs["ln_final"])
    assert found[-1][0].name == name


def test_embeddings_that_do_not_add_up_are_one_part() -> None:
    model, places = decoder(), places_of(decoder(), heads=())
    seen, _ = observed(model, places)
    seen.outputs["embed"] *= 2  # as if the model divided it by two
    sources = find_sources(model, places, seen, ["embed", "pos_embed"])
    assert sources[0] == Source(Part("embed"))
    (first, rows), *_ = contributions(model, places, sources, seen)
    assert first.name == "embed" and torch.equal(rows, seen.inputs["blocks.0"])


def test_heads_that_no_block_adds_are_refused() -> None:
    model, places = decoder(), places_of(decoder())
    model.blocks[1].residual_multiplier = 0.5
    with pytest.raises(HookrunError, match=r"task.heads: blocks.1.attn.out is not part"):
        sources_of(model, places)


def test_attention_and_mlp_of_each_block_are_found() -> None:
    model, places = decoder(), places_of(decoder())
    by_layer = [
        (layer, f"{block}.{name}") for layer, block in enumerate(places.blocks) for name in ("attn", "mlp")
    ]
    of_blocks = [Source(Part(path, layer), (path,)) for layer, path in by_layer]
    embeddings = [Source(Part(path), (path,)) for path in ("embed", "pos_embed")]
    assert [source._replace(heads=None) for source in sources_of(model, places)] == [*embeddings, *of_blocks]
