"""One forward of a decoder is recorded as hooks by hand see it, each value before and after the experiment's hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observed_decoders import IDS, ROWS, decoder, edit, observed, places_of
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookrunError
from hookrun.tasks.loop.lens.observing import Observer


@torch.no_grad()
def outputs(model: nn.Module, *paths: str) -> list[Tensor]:
    """[3, D] of each module: its output at the positions that are read."""
    seen = dict[str, Tensor]()
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: seen.__setitem__(path, output.expand(2, -1, -1)[ROWS])
        )
        for path in paths
    ]
    model(IDS)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


def test_streams_and_what_is_added_are_those_that_hooks_by_hand_see() -> None:
    model = decoder()
    seen, output = observed(model)
    embedded, positions, first, second, attention, normed, scores = outputs(
        model, "embed", "pos_embed", "blocks.0", "blocks.1", "blocks.1.attn", "ln_final", "unembed"
    )
    assert [block.path for block in seen.blocks] == ["blocks.0", "blocks.1"]
    assert list(seen.embedded) == ["embed", "pos_embed"]
    assert torch.equal(seen.embedded["embed"] + positions, seen.blocks[0].entered)
    assert torch.equal(seen.embedded["embed"], embedded)
    for block, left in zip(seen.blocks, (first, second), strict=True):
        assert block.left is not None and block.left_before is not None
        assert torch.equal(block.left, left) and torch.equal(block.left_before, left)
        assert [chain[-1].path for chain in block.added] == [f"{block.path}.attn", f"{block.path}.mlp"]
        assert [call.path for call in block.sum_calls] == [
            f"{block.path}.resid_mid",
            f"{block.path}.resid_post",
        ]
    (norm_of_it, call) = seen.blocks[1].added[0]
    assert norm_of_it.path == "blocks.1.ln1" and torch.equal(call.after, attention)
    assert seen.norm is not None and torch.equal(seen.norm.after, normed)
    assert torch.equal(seen.scores[ROWS], scores) and torch.equal(seen.logits, output)
    assert not any(call.inputs or call.output is not None for call in seen.blocks[0].sum_calls)


def test_what_hooks_change_is_seen_before_and_after_them() -> None:
    model = decoder()
    seen, output = observed(
        model,
        block=edit("blocks.0"),
        attention=edit("blocks.1.attn"),
        entering=edit("ln_final", "forward_pre"),
        into=edit("unembed", "forward_pre", factor=5),
        unembed=edit("unembed"),
        whole=edit("", factor=3),
    )
    first, second = seen.blocks
    assert torch.equal(first.left, 2 * first.left_before) and torch.equal(second.entered_before, first.left)
    calls = {call.path: call for chain in second.added for call in chain}
    assert calls["blocks.1.attn"].edited and not calls["blocks.1.mlp"].edited
    assert torch.equal(calls["blocks.1.attn"].after, 2 * calls["blocks.1.attn"].before)
    assert torch.equal(seen.norm.entered, 2 * seen.norm_entered_before)
    assert torch.equal(seen.unembed_entered, 5 * seen.unembed_entered_before)
    assert torch.equal(seen.scores_after, 2 * seen.scores) and torch.equal(seen.logits, seen.scores_after)
    assert torch.equal(output, 3 * seen.logits)


def test_rows_are_copies_that_what_comes_after_does_not_change() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            return x.mul_(2)

    model = decoder()
    model.blocks[1] = InPlace()
    seen, _ = observed(model, places_of(decoder(), heads=()))
    assert torch.equal(seen.blocks[1].left, 2 * seen.blocks[1].entered)
    assert torch.equal(seen.blocks[1].entered, seen.blocks[0].left)


def test_a_model_that_runs_in_inference_mode_is_observed_alike() -> None:
    model = decoder()
    expected, _ = observed(model)
    model.forward = torch.inference_mode()(model.forward)
    found, _ = observed(model)
    assert [len(block.added) for block in found.blocks] == [2, 2]
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        assert torch.equal(one.left, other.left) and torch.equal(one.entered, other.entered)


def test_the_model_is_left_as_it_was_and_nothing_is_seen_outside_begin_and_end() -> None:
    model = decoder()

    def hooks() -> int:
        return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())

    observer = Observer(model, places_of(model), inside=True)
    with pytest.raises(ZeroDivisionError), observer, torch.no_grad():
        model(IDS)
        assert observer.seen.blocks == [] and hooks() > 0
        observer.begin(ROWS, (2, 4))
        model(IDS)
        whole = observer.end()
        model(IDS)
        assert len(whole.blocks) == 2 and observer.seen.blocks == []
        raise ZeroDivisionError
    assert hooks() == 0


def test_a_model_that_runs_otherwise_is_told() -> None:
    model = decoder()
    for places, said in (
        (places_of(model, blocks=("blocks.1", "blocks.0")), r"ran as \['blocks.0', 'blocks.1'\], expected"),
        (places_of(model, blocks=("blocks.0",), final_norm="blocks.0.ln1"), "blocks.0.ln1 did not return"),
        (places_of(model, blocks=("blocks.0.attn.scores",)), "does not pass a tensor"),
    ):
        with pytest.raises(HookrunError, match=said):
            observed(model, places)
    with hookrun.hooked(model, {}), Observer(model, places_of(model), inside=False) as observer:
        observer.begin(ROWS, (2, 4))
        with pytest.raises(HookrunError, match=r"the blocks ran as \[\]"):
            observer.end()
