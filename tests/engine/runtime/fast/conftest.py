"""What is faster is tested only where it is on; what the hooks do is tested with and without it."""

from __future__ import annotations

from hookrun.engine.runtime import fast

collect_ignore_glob = [] if fast.IS_ON else ["test_direct_calls.py", "test_small_tensors.py"]
