from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.integrations.vllm.facts import OffloadedGroup, engine_facts, row_shape, spec_facts
from unified_cache.integrations.vllm.names import VllmFacts
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.integrations.weights import weights_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HFConfig:
    values: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        return self.values


@dataclass
class ModelConfig:
    model: str = "org/model"
    revision: str | None = COMMIT
    dtype: object = "torch.bfloat16"
    quantization: object = None
    seed: int = 0
    hf_config: HFConfig = field(default_factory=lambda: HFConfig({"rope_theta": 10_000, "_name_or_path": "org/model"}))


@dataclass
class CacheSettings:
    cache_dtype: str = "auto"
    prefix_caching_hash_algo: str = "sha256"


@dataclass
class LoadSettings:
    load_format: object = "auto"


@dataclass
class AttentionSettings:
    backend: object = None


@dataclass
class SpeculativeSettings:
    method: object = "eagle"
    draft_model_config: ModelConfig | None = None


@dataclass
class VllmSettings:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheSettings = field(default_factory=CacheSettings)
    load_config: LoadSettings = field(default_factory=LoadSettings)
    attention_config: AttentionSettings = field(default_factory=AttentionSettings)
    speculative_config: SpeculativeSettings | None = None


@dataclass
class WindowSpec:
    block_size: int = 16
    sliding_window: int | None = 64
    heads: int = 2

    @property
    def page_size_bytes(self) -> int:
        return 1024 * self.heads


@dataclass
class CacheGroup:
    layer_names: Sequence[str] = ("layers.0", "layers.2")
    kv_cache_spec: WindowSpec = field(default_factory=WindowSpec)


@dataclass
class GroupConfig:
    group_id: int = 0
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layers.0", "layers.2")


@dataclass
class NamedModel:
    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclass
class ChunkSizes:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 2


@dataclass
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass
class Offloading:
    groups: Sequence[GroupConfig] = (GroupConfig(),)
    model: NamedModel = field(default_factory=NamedModel)
    cache: ChunkSizes = field(default_factory=ChunkSizes)
    parallel: Parallel = field(default_factory=Parallel)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


@dataclass
class OffloadingSpec:
    config: Offloading = field(default_factory=Offloading)
    replicated_layout: bool = False
    cpu_page_size_per_worker: int = 3000


URL = TierSettings(url="file:/kv")


def facts(
    config: VllmSettings | None = None,
    offloading: Offloading | None = None,
    group: CacheGroup | None = None,
    settings: TierSettings = URL,
) -> VllmFacts:
    groups = [OffloadedGroup(0, group or CacheGroup(), SPAN_ALL)]
    return engine_facts(config or VllmSettings(), offloading or Offloading(), groups, {"engine": "vllm 0"}, settings)


def test_a_person_can_read_what_the_bytes_depend_on() -> None:
    found = facts()
    assert (found.model, found.revision, found.dtype) == ("org/model", f"commit {COMMIT}", "bfloat16")
    assert found.groups[0].tokens_per_chunk == 32
    assert found.groups[0].kind.startswith("WindowSpec: 2 layers, 16 tokens, 2048 bytes, sliding_window 64, ")
    assert found.others["parallel"] == "tp 2 pp 1 pcp 1 dcp 1"
    assert found.others["hash"] == "sha256"
    assert found.others["quantization"] == "none"


@pytest.mark.parametrize(
    "other",
    [
        facts(VllmSettings(ModelConfig(quantization="fp8"))),
        facts(VllmSettings(ModelConfig(dtype="torch.float16"))),
        facts(VllmSettings(ModelConfig(revision=COMMIT[::-1]))),
        facts(VllmSettings(ModelConfig(hf_config=HFConfig({"rope_theta": 20_000})))),
        facts(VllmSettings(cache_config=CacheSettings(prefix_caching_hash_algo="sha256_cbor"))),
        facts(VllmSettings(cache_config=CacheSettings(cache_dtype="fp8"))),
        facts(VllmSettings(attention_config=AttentionSettings("TRITON_ATTN"))),
        facts(VllmSettings(speculative_config=SpeculativeSettings(draft_model_config=ModelConfig("org/draft")))),
        facts(offloading=replace(Offloading(), kv_cache_layout="BLHNC")),
        facts(offloading=replace(Offloading(), parallel=Parallel(tp_size=1, pp_size=2))),
        facts(offloading=replace(Offloading(), replicated_layout=True)),
        facts(offloading=replace(Offloading(), cache=ChunkSizes(blocks_per_chunk=1))),
        facts(group=CacheGroup(kv_cache_spec=WindowSpec(sliding_window=128))),
        facts(group=CacheGroup(kv_cache_spec=WindowSpec(heads=4))),
        facts(group=CacheGroup(layer_names=("layers.1", "layers.3"))),
        facts(settings=TierSettings(url="file:/kv", revision="my own")),
        facts(settings=TierSettings(url="file:/kv", model="my own")),
    ],
)
def test_what_changes_the_bytes_changes_the_facts(other: VllmFacts) -> None:
    assert other != facts()


def test_where_the_model_lies_does_not_change_its_configuration() -> None:
    moved = HFConfig({"rope_theta": 10_000, "_name_or_path": "/elsewhere", "transformers_version": "9"})
    assert facts(VllmSettings(ModelConfig(hf_config=moved))) == facts()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_that_is_seeded_at_random_is_refused_by_name(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"found {algorithm}$"):
        facts(VllmSettings(cache_config=CacheSettings(prefix_caching_hash_algo=algorithm)))


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_revision_that_names_no_commit_is_none(revision: str | None) -> None:
    assert facts(VllmSettings(ModelConfig(revision=revision))).revision == ""


def test_weights_that_the_engine_draws_have_no_revision_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    dummy = VllmSettings(ModelConfig(str(tmp_path)), load_config=LoadSettings("dummy"))
    assert facts(dummy).revision == ""
    assert facts(dummy, settings=TierSettings(url="file:/kv", revision="drawn")).revision == "drawn"


def test_local_weights_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    local = VllmSettings(ModelConfig(str(tmp_path), revision=None))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("not a weight")
    first = facts(local)
    (tmp_path / "README.md").write_text("nor is this")
    assert facts(local) == first
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert facts(local).revision != first.revision


def test_the_same_weights_at_another_path_are_the_same_model(tmp_path: Path) -> None:
    found = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        found.append(facts(VllmSettings(ModelConfig(str(tmp_path / name), revision=None))))
    assert found[0] == found[1]
    assert found[0].model == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "settings", [TierSettings(url="file:/kv", revision="1"), TierSettings(url="file:/kv", model="m")]
)
def test_a_name_or_revision_of_the_user_s_stands_beside_what_is_known(tmp_path: Path, settings: TierSettings) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = facts(VllmSettings(ModelConfig(str(tmp_path), revision=None)), settings=settings)
    assert found.model == (settings.model or str(tmp_path))
    assert found.revision == (settings.revision or f"weights {weights_digest(tmp_path)}")


def test_files_of_weights_in_one_directory_are_models_of_their_own(tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("q4.gguf", "q8.gguf")]
    for model in models:
        model.write_bytes(model.name.encode())
    first, second = (facts(VllmSettings(ModelConfig(str(model), revision=None))) for model in models)
    assert first != second


def test_a_digest_of_weights_knows_every_byte_and_every_name(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 3_000_000)
    digests = [weights_digest(tmp_path)]
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"!")
    digests.append(weights_digest(tmp_path))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    digests.append(weights_digest(tmp_path))
    assert len(set(digests)) == 3


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold weights"):
        weights_digest(tmp_path)


def test_a_bare_tier_knows_what_vllm_tells_it() -> None:
    found = spec_facts(Offloading(), TierSettings(url="file:/kv", revision="1"))
    assert (found.model, found.revision, found.groups[0].span) == ("org/model", "1", SPAN_UNKNOWN)
    assert found.others.keys() < facts().others.keys()


def test_a_row_holds_every_worker_once() -> None:
    assert row_shape(OffloadingSpec(), 8192).payload_bytes == 6000
    assert row_shape(OffloadingSpec(replicated_layout=True), 4096).payload_bytes == 3000
