"""Notes for the reader of the page."""

from __future__ import annotations


def test_a_budget_that_was_used_up_is_noted(run, page) -> None:
    path = run("task=predict", h="{select: fc, hook: forward, action: capture, max_bytes: 6000}")
    assert (
        "h captured nothing after epoch 0, step 2 (eval mode): its max_bytes of 6,000 were used up"
        in page(path).text
    )
