"""Facts of a running SGLang, as both ways into it name their pages; imports SGLang."""

# pyright: reportMissingImports=false

import hashlib
import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_server_args

from unified_cache.integrations.sglang.naming import EngineFacts
from unified_cache.integrations.sglang.settings import StoreSettings
from unified_cache.integrations.weights import config_digest, weights_digest, weights_of

logger = logging.getLogger(__name__)

ARGUMENTS = (
    "attention_backend",
    "decode_attention_backend",
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "prefill_attention_backend",
    "quantization",
    "quantization_param_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Arguments of the server that change what pages hold: facts of every identity."""

NOTHING_RESTORED = "docs/sglang.md#nothing-is-restored"
"""Section of a document that says what to do."""


def engine_facts(config: HiCacheStorageConfig, settings: StoreSettings) -> EngineFacts:
    """Return the facts of this engine; model and revision are as ``weights_of`` has them.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    arguments, server_args = _server_arguments(), get_server_args()
    path, commit = (resolution_result(server_args, name) or "" for name in ("model_path", "revision"))
    named = f"{path}@{commit or 'default'}"
    model, revision = weights_of(config.model_name or "unnamed", path, settings.revision or "", named)
    if not settings.revision:
        draft = arguments.get("speculative_draft_model_path", "")
        if draft and Path(draft).is_dir():
            arguments["speculative_draft_model_path"] = weights_digest(Path(draft))
        if path and Path(path).is_dir():
            arguments |= {"config": config_digest(Path(path))}
        elif revision == named and not commit:
            logger.warning("the weights of %s have no name that is sure to change with them: say revision", path)
    return EngineFacts.of(config, settings, model, arguments, revision)


def _server_arguments() -> dict[str, str]:
    """Return what SGLang decided about the arguments that change what pages hold, as far as it says something."""
    server_args = get_server_args()
    decided = {name: resolution_result(server_args, name) for name in ARGUMENTS}
    arguments = {name: str(value) for name, value in decided.items() if value not in {None, "", "{}"}}
    adapters = _adapters(resolution_result(server_args, "lora_paths"))
    return {**arguments, "adapters": adapters} if adapters else arguments


def _adapters(paths: object) -> str:
    """Return a digest of the adapters that are loaded at start, by their weights, and of one in no directory by name.

    SGLang's keys have an adapter's name and path alone, which stay as they are when it is trained again.
    """
    if isinstance(paths, Mapping):
        named = [str(path) for path in paths.values()]
    elif isinstance(paths, Sequence) and not isinstance(paths, str):
        named = [_adapter_path(each) for each in paths]
    else:
        named = []
    weights = sorted(weights_digest(Path(path)) if Path(path).is_dir() else path for path in named)
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()[:32] if weights else ""


def _adapter_path(adapter: object) -> str:
    """Return the path of an adapter in one of SGLang's forms: ``name=path``, a mapping, or a LoRARef."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    return str(adapter["lora_path"] if isinstance(adapter, Mapping) else attrgetter("lora_path")(adapter))
