"""Facts about a vLLM engine that the bytes of its KV depend on, read from its configuration.

The connector sees all of them; a bare tier sees what ``OffloadingConfig`` has, and the user gives it the revision.
vLLM's classes are named, not imported: fields as in vLLM 0.33.
"""

import dataclasses
import hashlib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_UNKNOWN
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.integrations.weights import weights_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_offload.config import OffloadingConfig  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # pyright: ignore[reportMissingImports]

STABLE_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Algorithms of vLLM whose hashes are 32 bytes and the same in every process."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""Revision that vLLM has resolved at the hub."""

REPORTED_FIELDS = ("sliding_window", "attention_chunk_size", "mamba_type", "mamba_cache_mode", "kv_quant_mode")
"""Fields of a KV cache spec that a person wants to read; the digest has all of them."""

VOLATILE_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Keys of a model's configuration that say nothing about its KV."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group of layers that vLLM offloads: they share block tables, and so their chunks."""

    number: int
    """Number of the group in vLLM's KV cache configuration, and in its offload keys."""
    tokens_per_chunk: int
    span: int
    """Chunks that a resume needs of this group: ``SPAN_ALL`` for all, ``SPAN_UNKNOWN`` if the engine did not tell."""
    kind: str
    """Kind of its layers and their bytes, as text for the identity."""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """All that the bytes of a page depend on beside the tokens. Engines share pages only where it is equal."""

    model: str
    revision: str
    """Commit or digest of the weights."""
    dtype: str
    """Type of the KV cache's numbers."""
    groups: tuple[GroupFacts, ...]
    others: Mapping[str, str]
    """Anything else by name: quantization, attention backend, hash, parallel sizes, layout of a block."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """One row of vLLM's host memory."""

    stride_bytes: int
    """From the start of a row to the start of the next, aligned to a memory page."""
    payload_bytes: int
    """Of all workers; what follows it in the row is alignment."""

    def __post_init__(self) -> None:
        if not 0 < self.payload_bytes <= self.stride_bytes:
            raise ConfigError(
                f"a row of {self.stride_bytes} bytes must hold the chunk of all workers, found {self.payload_bytes}"
            )


def engine_facts(
    config: "VllmConfig",
    offloading: "OffloadingConfig",
    groups: Sequence[GroupFacts],
    machine: Mapping[str, str],
    settings: TierSettings,
) -> VllmFacts:
    """Return the facts of an engine; ``machine`` says what runs it.

    Model and revision are as ``weights_of`` has them; of weights that vLLM draws there is the user's word alone.

    Raises:
        ConfigError: keys that no other process would find, or weights that cannot be distinguished from others.
    """
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in STABLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo must be one of {', '.join(sorted(STABLE_HASHES))} for keys that another "
            f"process finds, found {algorithm}"
        )
    model = config.model_config
    facts = {
        **_shared_facts(offloading),
        **machine,
        "attention backend": _text(config.attention_config.backend, "auto"),
        "config": _config_digest(model.hf_config),
        "dtype": _text(model.dtype, "auto").removeprefix("torch."),
        "hash": algorithm,
        "kv cache dtype": config.cache_config.cache_dtype,
        "quantization": _text(model.quantization, "none"),
    }
    speculative = config.speculative_config
    if speculative is not None:
        draft = speculative.draft_model_config
        own = draft is None or draft.model == model.model
        weights = "" if own or draft is None else f" {weights_of('', draft.model, '', _commit(draft))[1]}"
        facts["draft"] = f"{speculative.method}{weights}"
    name, revision = settings.model or model.model, settings.revision
    if _text(config.load_config.load_format, "") != "dummy":
        name, revision = weights_of(name, model.model, revision, _commit(model))
    return VllmFacts(name, revision, offloading.model.dtype, tuple(groups), facts)


def spec_facts(offloading: "OffloadingConfig", settings: TierSettings) -> VllmFacts:
    """Return what a bare tier knows: without revision, quantization, hash, kinds and windows of groups."""
    blocks = offloading.cache.blocks_per_chunk
    groups = tuple(
        GroupFacts(
            group.group_id,
            group.tokens_per_block * blocks,
            SPAN_UNKNOWN,
            f"layers {_digest(','.join(group.layer_names))}",
        )
        for group in offloading.groups
    )
    name = settings.model or offloading.model.name
    return VllmFacts(name, settings.revision, offloading.model.dtype, groups, _shared_facts(offloading))


def row_shape(spec: "CPUOffloadingSpec", stride_bytes: int) -> RowShape:
    """Return the shape of a row of vLLM's host memory, as its spec lays it out: all workers, then alignment."""
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    return RowShape(stride_bytes, min(spec.cpu_page_size_per_worker * copies, stride_bytes))


def _shared_facts(offloading: "OffloadingConfig") -> dict[str, str]:
    """Return the facts that a bare tier knows, too."""
    parallel = offloading.parallel
    is_one_copy = offloading.replicated_layout or parallel.world_size == 1
    sizes = f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size}"
    return {
        "block layout": offloading.kv_cache_layout or "unknown",
        "chunk": f"{offloading.cache.blocks_per_chunk} blocks, {offloading.cache.tokens_per_hash} tokens per hash",
        "parallel": "any" if is_one_copy else sizes,
        "row": "canonical" if offloading.canonical_layout else "one copy" if is_one_copy else "ranks",
    }


def _commit(model: "ModelConfig") -> str:
    """Return the commit that vLLM has resolved at the hub; empty if it has none."""
    return f"commit {model.revision}" if model.revision and COMMIT.fullmatch(model.revision) else ""


def group_kind(group: "KVCacheGroupSpec") -> str:
    """Return kind, sizes and windows of a group's layers, and a digest of all that its spec says.

    A field that has its default says nothing: of two versions, one has fields that the other does not.
    """
    spec = group.kv_cache_spec
    parts = [f"{len(group.layer_names)} layers", f"{spec.block_size} tokens", f"{spec.page_size_bytes} bytes"]
    if dataclasses.is_dataclass(spec):
        names = {each.name for each in dataclasses.fields(spec)}
        values = {name: operator.attrgetter(name)(spec) for name in REPORTED_FIELDS if name in names}
        parts += [f"{name} {_text(value, '')}" for name, value in values.items() if value is not None]
    return f"{type(spec).__name__}: {', '.join(parts)}, {_digest(f'{list(group.layer_names)} {_said(spec)}')}"


def _said(value: object) -> str:
    """Return what a spec says as text, those in it by what they say."""
    if isinstance(value, Mapping):
        return str(sorted((str(name), _said(each)) for name, each in value.items()))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = {each.name: each.default for each in dataclasses.fields(value) if each.compare}
    values = {name: operator.attrgetter(name)(value) for name in fields}
    said = (f"{name}={_said(values[name])}" for name, default in fields.items() if values[name] != default)
    return f"{type(value).__name__}({', '.join(said)})"


def _config_digest(config: "PretrainedConfig") -> str:
    values = config.to_dict()
    return _digest(repr(sorted((key, repr(value)) for key, value in values.items() if key not in VOLATILE_KEYS)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(value: object, absent: str) -> str:
    """Return a setting as text: of an enum its name, ``absent`` for None."""
    if value is None:
        return absent
    return value.lower() if isinstance(value, str) else str(value).rpartition(".")[2].lower()
