from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.integrations.vllm.facts import GroupFacts, VllmFacts, engine_facts, group_kind, row_shape, spec_facts
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.integrations.weights import weights_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def namespace(defaults: Mapping[str, object]) -> Callable[..., Any]:
    """Return what makes one of vLLM's configurations, with other values of some fields."""
    return lambda **changes: SimpleNamespace(**{**defaults, **changes})


def hf_config(**values: object) -> Any:
    return SimpleNamespace(to_dict=lambda: {"rope_theta": 10_000, "_name_or_path": "org/model", **values})


model_config = namespace(
    {
        "model": "org/model",
        "revision": COMMIT,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_config": hf_config(),
    }
)
cache_config = namespace({"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"})
vllm_config = namespace(
    {
        "model_config": model_config(),
        "cache_config": cache_config(),
        "load_config": SimpleNamespace(load_format="auto"),
        "attention_config": SimpleNamespace(backend=None),
        "speculative_config": None,
    }
)
chunk_sizes = namespace({"tokens_per_hash": 16, "blocks_per_chunk": 2})
parallel = namespace({"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1})
offloaded = namespace(
    {
        "groups": [SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layers.0", "layers.2"))],
        "model": SimpleNamespace(name="org/model", dtype="bfloat16"),
        "cache": chunk_sizes(),
        "parallel": parallel(),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
)
DRAFTING = SimpleNamespace(method="eagle", draft_model_config=model_config(model="org/draft"))
offloading_spec = namespace({"config": offloaded(), "replicated_layout": False, "cpu_page_size_per_worker": 3000})


@dataclass
class WindowSpec:
    block_size: int = 16
    sliding_window: int | None = 64
    heads: int = 2

    @property
    def page_size_bytes(self) -> int:
        return 1024 * self.heads


cache_group = namespace({"layer_names": ("layers.0", "layers.2"), "kv_cache_spec": WindowSpec()})

URL = TierSettings(url="file:/kv")


def facts(config: Any = None, offloading: Any = None, group: Any = None, settings: TierSettings = URL) -> VllmFacts:
    groups = [GroupFacts(0, 32, SPAN_ALL, group_kind(group or cache_group()))]
    return engine_facts(config or vllm_config(), offloading or offloaded(), groups, {"engine": "vllm 0"}, settings)


def test_a_person_can_read_what_the_bytes_depend_on() -> None:
    found = facts()
    assert (found.model, found.revision, found.dtype) == ("org/model", f"commit {COMMIT}", "bfloat16")
    assert found.groups[0].kind.startswith("WindowSpec: 2 layers, 16 tokens, 2048 bytes, sliding_window 64, ")
    assert found.others["parallel"] == "tp 2 pp 1 pcp 1 dcp 1"
    assert found.others["hash"] == "sha256"
    assert found.others["quantization"] == "none"


@pytest.mark.parametrize(
    "other",
    [
        facts(vllm_config(model_config=model_config(quantization="fp8"))),
        facts(vllm_config(model_config=model_config(dtype="torch.float16"))),
        facts(vllm_config(model_config=model_config(revision=COMMIT[::-1]))),
        facts(vllm_config(model_config=model_config(hf_config=hf_config(rope_theta=20_000)))),
        facts(vllm_config(cache_config=cache_config(prefix_caching_hash_algo="sha256_cbor"))),
        facts(vllm_config(cache_config=cache_config(cache_dtype="fp8"))),
        facts(vllm_config(attention_config=SimpleNamespace(backend="TRITON_ATTN"))),
        facts(vllm_config(speculative_config=DRAFTING)),
        facts(offloading=offloaded(kv_cache_layout="BLHNC")),
        facts(offloading=offloaded(parallel=parallel(tp_size=1, pp_size=2))),
        facts(offloading=offloaded(replicated_layout=True)),
        facts(offloading=offloaded(cache=chunk_sizes(blocks_per_chunk=1))),
        facts(group=cache_group(kv_cache_spec=WindowSpec(sliding_window=128))),
        facts(group=cache_group(kv_cache_spec=WindowSpec(heads=4))),
        facts(group=cache_group(layer_names=("layers.1", "layers.3"))),
        facts(settings=TierSettings(url="file:/kv", revision="my own")),
        facts(settings=TierSettings(url="file:/kv", model="my own")),
    ],
)
def test_what_changes_the_bytes_changes_the_facts(other: VllmFacts) -> None:
    assert other != facts()


def test_ranks_that_hold_all_of_a_chunk_share_it_with_any_number_of_others() -> None:
    whole = [
        facts(offloading=offloaded(replicated_layout=ranks > 1, parallel=parallel(world_size=ranks, tp_size=ranks)))
        for ranks in (1, 2, 4)
    ]
    assert whole[0] == whole[1] == whole[2] != facts()
    canonical = [offloaded(canonical_layout=True, replicated_layout=True, parallel=parallel(tp_size=n)) for n in (2, 4)]
    assert facts(offloading=canonical[0]) == facts(offloading=canonical[1]) != whole[1]


def test_a_field_that_a_later_version_adds_says_nothing_until_it_says_something() -> None:
    later = make_dataclass("WindowSpec", [("sinks", int, field(default=0))], bases=(WindowSpec,))
    assert group_kind(cache_group(kv_cache_spec=later())) == group_kind(cache_group())
    assert group_kind(cache_group(kv_cache_spec=later(sinks=1))) != group_kind(cache_group())


def test_where_the_model_lies_does_not_change_its_configuration() -> None:
    moved = hf_config(_name_or_path="/elsewhere", transformers_version="9")
    assert facts(vllm_config(model_config=model_config(hf_config=moved))) == facts()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_that_is_seeded_at_random_is_refused_by_name(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"found {algorithm}$"):
        facts(vllm_config(cache_config=cache_config(prefix_caching_hash_algo=algorithm)))


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_revision_that_names_no_commit_is_none(revision: str | None) -> None:
    assert facts(vllm_config(model_config=model_config(revision=revision))).revision == ""


def test_weights_on_this_machine_are_named_by_their_bytes_and_drawn_ones_by_the_user_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    local, digest = model_config(model=str(tmp_path), revision=None), f"weights {weights_digest(tmp_path)}"
    found = facts(vllm_config(model_config=local))
    assert (found.model, found.revision) == ("checkpoint", digest)
    drafting = SimpleNamespace(method="eagle", draft_model_config=local)
    assert facts(vllm_config(speculative_config=drafting)).others["draft"] == f"eagle {digest}"
    dummy = vllm_config(model_config=local, load_config=SimpleNamespace(load_format="dummy"))
    assert facts(dummy).revision == ""
    assert facts(dummy, settings=TierSettings(url="file:/kv", revision="drawn")).revision == "drawn"


def test_a_bare_tier_knows_what_vllm_tells_it() -> None:
    found = spec_facts(offloaded(), TierSettings(url="file:/kv", revision="1"))
    assert (found.model, found.revision) == ("org/model", "1")
    assert (found.groups[0].tokens_per_chunk, found.groups[0].span) == (32, SPAN_UNKNOWN)
    assert found.others.keys() < facts().others.keys()


def test_a_row_holds_every_worker_once() -> None:
    assert row_shape(offloading_spec(), 8192).payload_bytes == 6000
    assert row_shape(offloading_spec(replicated_layout=True), 4096).payload_bytes == 3000
