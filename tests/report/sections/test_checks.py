"""Checks that failed."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("policy", "code", "ends"), [("error", 3, "failed"), ("stop", 3, "stopped"), ("warn", 0, "done")]
)
def test_a_failed_check_is_shown_first_with_module_and_step(
    run, page, policy: str, code: int, ends: str
) -> None:
    entry = "{select: [layers.0, fc], hook: forward, action: check, max: 0.1, when: {step: {start: 3}}}"
    short = ("train.epochs=1", "train.limit_batches=8")
    path = run(*short, f"+hooks.bound.policy={policy}", code=code, bound=entry)
    found = page(path)
    assert f'class="stamp s-{ends}">{ends}<' in found.source
    assert "Failed checks: first bound at layers.0 (Linear), epoch 0, step 3" in found.text
