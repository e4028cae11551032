"""Files written in the background: in order, with the content at the time of the call, and no failure is lost."""

from __future__ import annotations

import pytest
import torch

from hookrun.store.files import StoreError
from hookrun.store.tree import Flat, flatten
from hookrun.tasks.loop import background_writer
from hookrun.tasks.loop.background_writer import BackgroundWriter


@pytest.mark.parametrize("most", [2**26, 0])
def test_it_is_written_in_order_with_the_content_at_the_call(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "MOST", most)  # 0: too large to be copied
    writing, written, weight = BackgroundWriter(), list[float](), torch.zeros(4)
    for _ in range(20):
        weight += 1
        writing.write(flatten({"weight": weight}), lambda tree: written.append(float(tree.tensors["0"][0])))
    writing.close()
    assert written == list(range(1, 21))


def test_a_failed_write_is_raised_once_and_nothing_is_written_after_it() -> None:
    def refuse(_: Flat) -> None:
        raise StoreError("the disk is full")

    writing, written = BackgroundWriter(), list[int]()
    writing.write(flatten({}), refuse)
    with pytest.raises(StoreError, match="full"):
        writing.wait()
    writing.write(flatten({}), lambda _: written.append(1))
    writing.close()
    assert not written
