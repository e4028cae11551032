"""Sums modulo a number."""

from __future__ import annotations

from token_samples import made, real

from hookrun.data.samples import IGNORED


def test_modular_addition_has_every_pair_once_with_its_sum() -> None:
    seen = []
    for split in ("train", "val"):
        _, samples = made("modular_addition", split, modulus=7)  # type: ignore[arg-type]
        for number in range(len(samples)):
            (a, plus, b, equals), targets = real(samples[number])
            assert (plus, equals) == (7, 8) and targets == [IGNORED] * 3 + [(a + b) % 7]
            seen.append((a, b))
    assert sorted(seen) == [(a, b) for a in range(7) for b in range(7)]
