"""inspect_ai: the provider `hookrun`, whose models have the hooks of a bundle: `--model hookrun/PATH -M bundle=OUT`.

inspect_ai finds it by the entry point of this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookrun.integrations import needing

with needing("inspect_ai", "inspect", __name__):
    from inspect_ai.model import GenerateConfig, ModelAPI, modelapi


def hookrun() -> type[ModelAPI]:
    """The class of the models, which is made when it is asked for: it needs torch and transformers."""
    from inspect_ai.model._providers.hf import HuggingFaceAPI

    from hookrun.engine.runtime import Installation
    from hookrun.integrations.harness import install_bundle

    class HookedAPI(HuggingFaceAPI):  # type: ignore[misc]
        """inspect_ai's provider `hf`, with all of its arguments, under the hooks of a bundle.

        bundle: the folder that `python -m hookrun.bundle` wrote; None: no hooks

        hooks: the installation; None without a bundle
        """

        hooks: Installation | None = None

        def __init__(
            self,
            model_name: str,
            base_url: str | None = None,
            api_key: str | None = None,
            config: Any = GenerateConfig(),  # noqa: B008
            bundle: str | Path | None = None,
            **model_args: Any,
        ) -> None:
            super().__init__(model_name, base_url, api_key, config, **model_args)
            if bundle is not None:
                self.hooks, self._remove = install_bundle(bundle, self.model, self)

        def close(self) -> None:
            """Remove the hooks, and let the model go."""
            if self.hooks is not None:
                self._remove()
            super().close()

    return HookedAPI


modelapi(name="hookrun")(hookrun)
