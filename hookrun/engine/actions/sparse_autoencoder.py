"""The action `sparse_autoencoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.values import FolderValue
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE
from hookrun.engine.values.tensors import require_real

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class SparseAutoencoder(Action):
    """Encode vectors into sparse features and decode them again: x -> decode(encode(x)).

    weights: {folder: F}, a folder of SAELens: cfg.json and sae_weights.safetensors; standard, topk, jumprelu or gated
    error:   add x - decode(encode(x)), computed from the unedited features, through which no gradient flows: as long as
             no hook edits the features the value stays what it was, bit for bit

    Hooks with `select: "hook:NAME.features"` see and edit the features [..., d_sae] of the hook NAME, those with
    `select: "hook:NAME.error"` the error. If a module returns or gets several tensors, the first one of floating point
    is meant, unless `target` names another. It computes in the dtype of cfg.json, also under autocast. With
    `constant_norm_rescale` a vector of zeros becomes NaN, as in SAELens, since it is divided by its norm.
    """

    action_name = "sparse_autoencoder"
    hook_types = frozenset({FORWARD, FORWARD_PRE})
    weights: FolderValue
    error: bool = Field(default=False, strict=True)

    @property
    def points(self) -> tuple[str, ...]:
        """What other hooks can select."""
        return ("features", "error") if self.error else ("features",)

    def taken(self, value: Any, module: Module) -> Mapping[str, Tensor] | None:
        """The first tensor of several."""
        import torch

        from hookrun.engine.values.containers import tensors

        if isinstance(value, torch.Tensor):
            return None
        first = next(filter(torch.is_floating_point, tensors(value)), None)
        return {} if first is None else {"the first tensor": first}

    def build(self, site: HookSite) -> Edit:
        """A function x [..., d_in] -> its reconstruction, with the error if that is kept."""
        import torch

        autoencoder, weights_for = site.folder("weights")
        dtype = getattr(torch, autoencoder.config.dtype)
        features_point = site.point("features")
        error_point = site.point("error") if self.error else None

        def reconstruct(x: Tensor) -> Tensor:
            require_real(x)
            with torch.autocast(x.device.type, enabled=False):
                wide = x.to(dtype)
                features, decode = autoencoder.encode(wide, weights_for(wide))
                edited = features_point(features)
                decoded = decode(edited)
                if error_point is None:
                    return decoded.to(x.dtype)
                with torch.no_grad():
                    clean = decoded if edited is features else decode(features)
                clean = clean.detach()  # no_grad lets forward-mode gradients through
                old = x.detach()
                error = old - clean
                kept = error_point(error)
                # without edits the difference is 0, so that no bit changes: x - clean + clean would round
                new = old - (clean - decoded) if kept is error else decoded + kept
                return new.to(x.dtype)

        return reconstruct
