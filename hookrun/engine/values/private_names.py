"""The private names of torch, Hydra and OmegaConf without which hookrun does not work, and the error where one is gone.

A package may rename them in any version. They are looked up when the first file that needs them is imported, so that
the error names the package, its version and the name, and no run fails half-way. `runtime/fast/` has names of its own:
without those it does nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from pkgutil import resolve_name

from hookrun.errors import HookrunError, listed
from hookrun.version import __version__

NAMES = {
    "torch": {
        "torch": "_is_functional_tensor _foreach_norm _foreach_mul _foreach_copy_ "
        "_amp_foreach_non_finite_check_and_unscale_",
        "torch:Tensor": "_base _version _is_view _backward_hooks",
        "torch:UntypedStorage": "_cdata",
        "torch:_C": "_DisableFuncTorch _current_graph_task_id _dispatch_key_parse",
        "torch:_C._autograd": "_top_saved_tensors_default_hooks _get_creation_meta CreationMeta",
        "torch:ops.aten": "_grouped_mm",
        "torch:_C._functorch": "maybe_current_level maybe_get_bdim get_unwrapped is_functorch_wrapped_tensor "
        "is_batchedtensor is_functionaltensor",
        "torch._prims_common": "suggest_memory_format",
        "torch._subclasses.fake_tensor": "FakeCopyMode FakeTensorMode is_fake unset_fake_temporarily",
        "torch._utils": "_functionalize_sync",
        "torch.amp:GradScaler": "_found_inf_per_device",
        "torch.autograd": "_unsafe_preserve_version_counter",
        "torch.autograd:Variable": "_execution_engine",
        "torch.nn:Module": "_call_impl _compiled_call_impl _modules _parameters _forward_hooks _forward_pre_hooks "
        "_forward_hooks_with_kwargs _non_persistent_buffers_set",
        "torch.nn.modules.batchnorm": "_BatchNorm _NormBase",
        "torch.nn.modules.conv": "_ConvNd",
        "torch.nn.modules.dropout": "_DropoutNd",
        "torch.nn.modules.module": "_global_forward_hooks",
        "torch.nn.utils.parametrize": "_cache_enabled",
        "torch.nn.parallel:DistributedDataParallel": "_get_active_ddp_module",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "SUPPORTED_NODES",
        "torch.utils.checkpoint": "_CheckpointFrame _StopRecomputationError",
    },
    "torch, ranks": {"torch.distributed.distributed_c10d": "_abort_process_group"},
    "torch, fully_shard": {"torch.distributed.fsdp:FSDPModule": "_get_fsdp_state"},
    "torch, compiler": {
        "torch": "_TorchCompileInductorWrapper _TorchCompileWrapper",
        "torch._dynamo.eval_frame": "OptimizedModule",
        "torch._dynamo.exc": "TorchRuntimeError",
        "torch._dynamo.symbolic_convert": "InstructionTranslator",
        "torch._guards": "TracingContext",
        "torch._higher_order_ops.effects": "_EffectType _register_effectful_op",
    },
    "hydra-core": {
        "hydra._internal.config_loader_impl": "get_overrides_dirname",
        "hydra._internal.config_loader_impl:ConfigLoaderImpl": "_apply_overrides_to_config _load_configuration_impl "
        "_load_single_config _parse_overrides_and_create_caching_repo",
        "hydra._internal.config_repository": "CachingConfigRepository IConfigRepository",
        "hydra._internal.core_plugins.basic_launcher": "BasicLauncher",
        "hydra._internal.core_plugins.basic_sweeper": "BasicSweeper",
        "hydra._internal.core_plugins.file_config_source": "FileConfigSource",
        "hydra._internal.core_plugins.importlib_resources_config_source": "ImportlibResourcesConfigSource",
        "hydra._internal.hydra": "Hydra",
        "hydra._internal.sources_registry": "SourcesRegistry",
        "hydra._internal.utils": "create_config_search_path get_args_parser",
        "hydra.core.singleton:Singleton": "_instances",
        "hydra.core.utils:JobReturn": "_return_value",
        "hydra.plugins.config_source:ConfigSource": "_get_header_dict _normalize_file_name",
    },
    "omegaconf": {
        "omegaconf:Container": "resolve_parse_tree _resolve_node_interpolation _evaluate_custom_resolver",
        "omegaconf:DictConfig": "_content _get_node",
        "omegaconf:Node": "_value",
        "omegaconf.base": "parse",
        "omegaconf._utils": "get_yaml_loader",
    },
}
"""Package, and the part of it that is imported later -> where, as `pkgutil.resolve_name` takes it -> names there."""


@cache
def require(part: str) -> None:
    """Look up the names of a part of `NAMES`. Raises HookrunError with the package, its version and what it lacks."""
    package = part.partition(",")[0]
    import_module(package.partition("-")[0])  # a package that is not installed is another mistake
    missing = [f"{where}.{name}" for where, names in NAMES[part].items() for name in _missing(where, names)]
    if missing:
        raise HookrunError(
            f"{package} {version(package)} has no {listed([name.replace(':', '.') for name in missing], 3)}, which "
            f"hookrun {__version__} uses\n    install a version of {package} with which hookrun was tested: README.md"
        )


def _missing(where: str, names: str) -> list[str]:
    try:
        owner = resolve_name(where)
    except (ImportError, AttributeError):
        return names.split()
    annotated = getattr(owner, "__annotations__", {})  # what a class sets in its objects only
    return [name for name in names.split() if not hasattr(owner, name) and name not in annotated]
