"""What a person reads after a mistake is the text in tests/golden, which scripts/reference writes."""

from __future__ import annotations

import pytest
from golden import COMMAND, GOLDEN, blocks, repeated

BLOCKS = [(path.stem, block) for path in sorted(GOLDEN.glob("*.txt")) for block in blocks(path)]


@pytest.mark.parametrize(
    "block",
    [block for _, block in BLOCKS],
    ids=[f"{name}: {block.partition(COMMAND)[2].partition(chr(10))[0]}" for name, block in BLOCKS],
)
def test_a_mistake_is_told_in_these_words(block: str) -> None:
    assert repeated(block) == block, "if the new text is right, run scripts/reference"
    assert block.endswith("exit code 2\n")
