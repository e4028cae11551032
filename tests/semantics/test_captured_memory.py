"""A captured part holds the memory of that part only; `max_bytes` counts this memory and cuts a batch at a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime import fast
from hookrun.runtime.snapshot import held

WIDTH, LENGTH, BATCH = 8, 200, 4


class Makes(nn.Module):
    """Applies a function to its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def kept_bytes(value: Any) -> int:
    """The bytes of the storages of a captured value."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held(value)}
    return sum(storages.values())


PARTS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], int]] = {
    "the first token": (lambda x: x[:, 0], {}, BATCH * WIDTH),
    "within a tuple": (lambda x: (x[:, 0], None), {}, BATCH * WIDTH),
    "index": (lambda x: x * 1, {"index": ":, 0"}, BATCH * WIDTH),
    "index within a tuple": (lambda x: (x * 1,), {"index": ":, 0"}, BATCH * WIDTH),
    "target": (lambda x: {"a": x[:, 0], "b": x}, {"target": "a"}, BATCH * WIDTH),
    "target and index": (lambda x: {"a": x * 1}, {"target": "a", "index": "..., 0"}, BATCH * LENGTH),
    "one chunk": (lambda x: x.chunk(4, dim=-1)[0], {}, BATCH * LENGTH * WIDTH // 4),
    "the largest": (lambda x: x * 1, {"reduce": {"topk": 1}}, BATCH * LENGTH),
    "a mean over nothing": (lambda x: x[:, 0, 0], {"reduce": "mean"}, BATCH),
    "another dtype that is its own": (lambda x: x[:, 0], {"dtype": "float32"}, BATCH * WIDTH),
    "real of complex": (lambda x: torch.complex(x, x).real, {}, BATCH * LENGTH * WIDTH),
    "transposed": (lambda x: (x * 1).transpose(0, 1), {}, BATCH * LENGTH * WIDTH),
}
if fast.IS_ON:  # only a copy on write shares the memory of the expanded tensor
    PARTS["expanded"] = (lambda x: (x[:1, :1] * 1).expand(BATCH, LENGTH, WIDTH), {}, WIDTH)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PARTS)
def test_a_captured_part_holds_the_memory_of_that_part_only(name: str, mode: Any) -> None:
    make, keys, elements = PARTS[name]
    model = Makes(make)
    x = torch.rand(BATCH, LENGTH, WIDTH)
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", **keys}}
    with hookrun.hooked(model, spec) as hooks, mode():
        for _ in range(3):
            model(x)
    for kept in hooks.captures["h"][""]:
        assert kept_bytes(kept) == 4 * elements


def test_max_bytes_counts_the_bytes_of_captured_parts() -> None:
    model = Makes(lambda x: x[:, 0])
    size = 4 * BATCH * WIDTH
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 5 * size}}
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(8):
            model(torch.rand(BATCH, LENGTH, WIDTH))
    kept = hooks.captures["h"][""]
    assert len(kept) == 5 and sum(map(kept_bytes, kept)) == 5 * size


@pytest.mark.skipif(not fast.IS_ON, reason="only a copy on write shares the memory of the expanded tensor")
def test_max_bytes_counts_the_memory_of_an_expanded_tensor() -> None:
    model = Makes(lambda x: (x[:1, :1] * 1).expand(BATCH, LENGTH, WIDTH))
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 8 * 4 * WIDTH}}
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(20):
            model(torch.rand(BATCH, LENGTH, WIDTH))
    kept = hooks.captures["h"][""]
    assert len(kept) == 8 and sum(map(kept_bytes, kept)) == 8 * 4 * WIDTH


@pytest.mark.parametrize(
    ("limit", "rows"), [(3, 0), (4, 1), (7, 1), (11, 2), (16, 4), (23, 5), (64, 16), (1000, 20)]
)
def test_a_batch_beyond_max_bytes_is_cut_at_the_row(limit: int, rows: int) -> None:
    model = nn.Identity()
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": limit * 4}}
    batches = torch.arange(20 * 4.0).reshape(5, 4, 4)
    with hookrun.hooked(model, spec) as hooks:
        for batch in batches:
            model(batch)
    kept = hooks.captures["h"][""]
    found = torch.cat(kept) if kept else torch.empty(0, 4)
    torch.testing.assert_close(found, batches.flatten(0, 1)[:rows], rtol=0, atol=0)
    assert sum(map(kept_bytes, kept)) <= limit * 4


def test_all_tensors_of_a_container_are_cut_at_the_same_row() -> None:
    model = Makes(lambda x: (x, {"pooled": x[:, 0]}))
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 3 * 4 * (3 + 1) + 5}}
    with hookrun.hooked(model, spec) as hooks:
        for number in range(3):
            model(torch.full((4, 3), float(number)))
    (kept,) = hooks.captures["h"][""]
    assert kept[0].shape == (3, 3) and kept[1]["pooled"].shape == (3,)


@pytest.mark.parametrize(
    "make", [lambda x: (x, x.sum()), lambda x: (x, x[:2]), lambda x: x.sum(), lambda x: x.to_sparse()]
)
def test_a_value_without_batch_rows_is_kept_whole_or_not_at_all(make: Callable[[Tensor], Any]) -> None:
    model = Makes(make)
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 2}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(4, 3))
    assert hooks.captures["h"][""] == [] and hooks.records[0]["spent"] == 2


def test_a_parameter_gradient_is_not_cut_at_a_row() -> None:
    model = nn.Linear(4, 4)
    spec = {"h": {"select": "weight", "hook": "grad", "action": "capture", "max_bytes": 32}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2, 4)).sum().backward()
    assert hooks.captures["h"]["weight"] == []


def test_on_disk_the_rows_that_fit_are_kept_with_their_sample_ids(tmp_path: Any) -> None:
    from hookrun.cli import main

    folder = tmp_path / "run"
    hook = "+hooks.h={select: [fc], hook: forward, action: capture, max_bytes: 400}"
    assert (
        main(
            [
                "task=predict",
                "model=cnn",
                "data=digits",
                hook,
                f"hydra.run.dir={folder}",
                "data.batch_size=50",
            ]
        )
        == 0
    )
    found = hookrun.open_run(folder)
    kept = found.captures["h"]["fc"]
    assert kept.sample_ids.tolist() == list(range(10)) and kept[:].shape == (10, 10)
    assert [line["spent"] for line in found.stats] == [400]


@pytest.mark.parametrize("keep", ["every", "reservoir"])
def test_max_bytes_cuts_after_keep_has_chosen_samples(keep: str) -> None:
    model = nn.Identity()
    chosen = {"every": 2} if keep == "every" else {"reservoir": 6}
    spec = {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 3 * 4, "keep": chosen}}
    with hookrun.hooked(model, spec) as hooks:
        hooks.population = 12
        hooks.samples = range(12)
        model(torch.arange(12.0).reshape(12, 1))
        model(torch.arange(12.0).reshape(12, 1))
    (kept,) = hooks.captures["h"][""]
    assert kept.shape == (3, 1)
    if keep == "every":
        assert kept.flatten().tolist() == [0.0, 2.0, 4.0]
