"""Failures of a user's own code, and whether one is only due to the tensors of a fake run, which hold no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hookrun.callables import Code, place_of
from hookrun.errors import reason

if TYPE_CHECKING:
    from torch import Tensor


class OwnCodeError(ValueError):
    """A user's own code raised something, which is the cause.

    call: what was called with `value`
    """

    def __init__(
        self, hook: str, code: Code, error: Exception, value: Any, call: Callable[[Any], Any]
    ) -> None:
        self.hook = hook
        self.error = error
        self.value = value
        self.call = call
        super().__init__(f"'{code.name}' failed: {reason(error)}{place_of(error, code.package)}")


def only_without_data(failed: OwnCodeError) -> str | None:
    """Why the function cannot run on a tensor without data, where it does run on one with data; else None.

    What reads elements (`.item()`, NumPy, a condition on a value) fails in a fake run with exceptions of many kinds.
    Where the exception alone does not tell, the function is called with random numbers of the same shape and dtype.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    why = reason(failed.error)
    if _about_fake_tensors(failed.error):
        return why
    if not isinstance(failed.value, torch.Tensor):
        return None
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        try:
            failed.call(_stand_in(failed.value))
        except Exception as again:  # the user's own code may raise anything
            return why if _about_fake_tensors(again) else None
    return why


def _about_fake_tensors(error: BaseException | None) -> bool:
    """Whether the exception, or what caused it, says that a tensor is not a real one."""
    while error is not None:
        says_so = isinstance(error, RuntimeError | TypeError) and "FakeTensor" in str(error)
        if says_so or type(error).__module__.startswith(("torch._subclasses", "torch.fx")):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stand_in(fake: Tensor) -> Tensor:
    import torch

    made = torch.empty(tuple(fake.shape), dtype=fake.dtype, device=fake.device)
    if not made.is_floating_point():
        return made.zero_()
    return made.normal_(generator=torch.Generator(made.device).manual_seed(0)).requires_grad_(
        fake.requires_grad
    )
