"""SGLang's storage class over real stores: both call generations, any pools, several ranks, and nothing that raises."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.sglang_names import (
    FlatPool,
    HeadsPool,
    LogicalPool,
    PoolNames,
    SglangConfig,
    SglangExtraInfo,
    SglangTransfer,
    SglangVerdict,
    StatesPool,
    TensorPool,
    UnruledPool,
    adapter_class,
)
from tests.support.store_calls import ScriptedStorage, raising
from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers import Method

SLOTS = 32
EXTRA = {"backend_name": "ours", "module_path": "m", "class_name": "c", "interface_v1": 1, "revision": "r1"}


class Engine:
    """One rank: its storage, and its pools by name."""

    def __init__(self, cls: type, url: str, pools: Mapping[str, TensorPool], **config: object) -> None:
        extra = {**EXTRA, "url": url, **dict(config.pop("extra", {}))}  # type: ignore[call-overload]  # a mapping
        self.storage = cls(SglangConfig(extra_config=extra, **config), {})  # type: ignore[arg-type]  # its fields
        self.pools = dict(pools)
        self.storage.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            self.storage.register_mem_host_pool_v2(pool, PoolNames(name))
        self.storage.on_host_pools_registered()

    def fill(self, slots: Sequence[int], value: int) -> None:
        for pool in self.pools.values():
            for buffer in pool.buffers:
                buffer[list(slots)] = value

    def transfers(self, keys: Sequence[str], slots: Sequence[int], **policies: str) -> list[SglangTransfer]:
        """Name pools by the pool that they follow: ``c4="kv"``; pools of the same one share indices and keys."""
        shared: dict[str, torch.Tensor] = {}
        return [
            SglangTransfer(
                PoolNames(name),
                shared.setdefault(source, self.pools[name].indices(slots)),
                list(keys),
                indices_from_pool=None if source == name else PoolNames(source),
            )
            for name, source in policies.items()
        ]


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines over one store; they are stopped in the end."""
    with ExitStack() as stack:
        cls = stack.enter_context(adapter_class({"kv_cache_dtype": "auto"}))

        def start_engine(pools: Mapping[str, TensorPool] | None = None, url: str = "", **config: object) -> Engine:
            engine = Engine(cls, url or f"file:{tmp_path}", pools or {"kv": TensorPool(SLOTS)}, **config)
            stack.callback(engine.storage.close)
            return engine

        yield start_engine


def hashes(count: int, name: str = "") -> list[str]:
    return [hashlib.sha256(f"{name}{number}".encode()).hexdigest() for number in range(count)]


def look_up(*needs: tuple[str, str, str | None, int]) -> list[SglangTransfer]:
    """Transfers of a look-up: pool, policy, source, and how many pages a window has."""
    return [
        SglangTransfer(
            PoolNames(pool),
            None,
            ["__placeholder__"] * pages if pages else None,
            policy,
            PoolNames(source) if source else None,
        )
        for pool, policy, source, pages in needs
    ]


# ---- pages there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorPool, FlatPool])
def test_what_the_first_generation_stores_it_gets_back(start: Start, kind: type[TensorPool]) -> None:
    engine, keys = start({"kv": kind(SLOTS, 4, (48, 16))}), hashes(6)
    pool = engine.pools["kv"]
    pool.buffers[0][:6] = torch.arange(6, dtype=torch.uint8)[:, None]
    assert engine.storage.batch_set_v1(keys, pool.indices(range(6))) == [True] * 6
    assert engine.storage.batch_exists([*keys[:4], *hashes(1, "absent")]) == 4
    assert engine.storage.exists(keys[5])
    assert engine.storage.batch_get_v1(keys[::-1], pool.indices(range(10, 16))) == [True] * 6
    assert (pool.buffers[0][10:16, 5] == torch.arange(5, -1, -1)).all()
    assert not engine.storage.batch_get_v1(hashes(1, "absent"), pool.indices([20]))[0]


@pytest.mark.parametrize("kind", [TensorPool, FlatPool])
def test_a_page_beyond_the_pool_is_neither_stored_nor_read(start: Start, kind: type[TensorPool]) -> None:
    engine, keys = start({"kv": kind(SLOTS)}), hashes(2)
    beyond = engine.pools["kv"].indices([0, SLOTS])
    assert engine.storage.batch_set_v1(keys, beyond) == [False] * 2
    assert engine.storage.batch_exists(keys) == 0
    assert engine.storage.batch_get_v1(keys, beyond) == [False] * 2


@pytest.mark.parametrize("kind", [FlatPool, UnruledPool])
def test_a_page_that_is_shorter_than_the_pools_is_neither_stored_nor_read(start: Start, kind: type[TensorPool]) -> None:
    engine, keys = start({"kv": kind(SLOTS)}), hashes(2)
    pool = engine.pools["kv"]
    pool.buffers = [buffer[:, :-8].clone() for buffer in pool.buffers]
    assert engine.storage.batch_set_v1(keys, pool.indices([0, 1])) == [False] * 2
    assert engine.storage.batch_exists(keys) == 0


def test_a_pool_that_the_engine_made_otherwise_ends_its_start(start: Start) -> None:
    pool = TensorPool(SLOTS)
    del pool.size
    with pytest.raises(AttributeError, match="size"):
        start({"kv": pool})


def test_a_pool_of_block_groups_is_left_out_of_the_verdict(start: Start) -> None:
    engine, keys = start({"kv": TensorPool(SLOTS), "indexer": TensorPool(SLOTS)}), hashes(3)
    engine.storage.batch_set_v1(keys, engine.pools["kv"].indices(range(3)))
    found = engine.storage.batch_exists_v2(keys, look_up(("indexer", "block_groups", None, 0)))
    assert found == SglangVerdict(3, {"kv": 3}, [1, 2, 3])


@pytest.mark.parametrize("kind", ["file", "packed", "bucket"])
def test_what_was_stored_is_found_after_a_detach_and_an_attach(
    start: Start, store_url: Callable[[str], str], kind: str
) -> None:
    keys, url = hashes(4), store_url(kind)
    first = start(url=url)
    first.fill(range(4), 3)
    first.storage.batch_set_v1(keys, first.pools["kv"].indices(range(4)), SglangExtraInfo(hashes(1, "before")))
    first.storage.close()
    second = start(url=url)
    assert second.storage.batch_get_v1(keys, second.pools["kv"].indices(range(4))) == [True] * 4
    assert (second.pools["kv"].buffers[0][:4] == 3).all()


# ---- who shares what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_mla", "pool", "shared"),
    [
        (True, TensorPool(SLOTS), True),
        (False, TensorPool(SLOTS), False),
        (True, HeadsPool(SLOTS), False),
        (True, StatesPool(SLOTS), False),
    ],
    ids=["replicated", "sharded", "heads beside a replicated pool", "states beside a replicated pool"],
)
def test_ranks_share_pages_that_are_the_same_on_all_of_them(
    start: Start, is_mla: bool, pool: TensorPool, shared: bool
) -> None:
    keys = hashes(2)
    ranks = [
        start({"kv": TensorPool(SLOTS), "draft": pool}, is_mla_model=is_mla, tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    ranks[0].storage.batch_set_v2(ranks[0].transfers(keys, range(2), draft="draft"))
    found = ranks[1].storage.batch_get_v2(ranks[1].transfers(keys, range(2), draft="draft"))
    assert found["draft"] == [shared, shared]


@pytest.mark.parametrize(
    "other",
    [
        {"extra": {"revision": "r2"}},
        {"extra": {"generation": 1}},
        {"model_name": "example/other"},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"pools": {"kv": TensorPool(SLOTS, 8)}},
        {"pools": {"kv": TensorPool(SLOTS, 4, (32, 32))}},
        {"pools": {"kv": HeadsPool(SLOTS)}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_pages_of_another_model_format_or_part_are_not_found(start: Start, other: Mapping[str, object]) -> None:
    keys = hashes(2)
    first = start()
    first.storage.batch_set_v1(keys, first.pools["kv"].indices(range(2)))
    first.storage.close()
    assert start(**other).storage.batch_exists(keys) == 0


@pytest.mark.parametrize(
    "argument",
    [
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
    ],
)
def test_pages_of_an_engine_with_one_other_argument_are_not_found(tmp_path: Path, argument: str) -> None:
    keys, found = hashes(2), []
    for value in ("one", "other", "one"):
        with adapter_class({"kv_cache_dtype": "auto", argument: value}) as cls:
            engine = Engine(cls, f"file:{tmp_path}", {"kv": TensorPool(SLOTS)})
            found.append(engine.storage.batch_exists(keys))
            engine.storage.batch_set_v1(keys, engine.pools["kv"].indices(range(2)))
            engine.storage.close()
    assert found == [0, 0, 2]


@pytest.mark.parametrize("form", ["name=path", "mapping", "reference", "all by name"])
def test_an_adapter_that_is_trained_again_at_its_old_place_finds_no_pages_of_the_old_one(
    tmp_path: Path, form: str
) -> None:
    adapter = checkpoint(tmp_path / "adapter")
    forms: dict[str, object] = {
        "name=path": [f"style={adapter}"],
        "mapping": [{"lora_name": "style", "lora_path": str(adapter)}],
        "reference": [SimpleNamespace(lora_name="style", lora_path=str(adapter))],
        "all by name": {"style": str(adapter)},
    }
    keys, found = hashes(2), []
    for weights in ("weights", "weights", "trained again"):
        (adapter / "model.safetensors").write_text(weights)
        with adapter_class({"lora_paths": forms[form]}) as cls:
            engine = Engine(cls, f"file:{tmp_path / 'store'}", {"kv": TensorPool(SLOTS)})
            found.append(engine.storage.batch_exists(keys))
            engine.storage.batch_set_v1(keys, engine.pools["kv"].indices(range(2)))
            engine.storage.close()
    assert found == [0, 2, 0]


def found_in_turn(tmp_path: Path, *engines: tuple[Path, str]) -> list[int]:
    """Start one engine after the other by its checkpoint and its served name; return the pages that each finds."""
    keys, found = hashes(2), []
    for model, name in engines:
        pools = {"kv": TensorPool(SLOTS)}
        with adapter_class({"model_path": str(model)}) as cls:
            engine = Engine(cls, f"file:{tmp_path / 'store'}", pools, extra={"revision": None}, model_name=name)
            found.append(engine.storage.batch_exists(keys))
            engine.storage.batch_set_v1(keys, pools["kv"].indices(range(2)))
            engine.storage.close()
    return found


def checkpoint(directory: Path, weights: str = "weights", config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_text(weights)
    (directory / "config.json").write_text(config)
    return directory


def test_weights_and_configuration_are_the_model_and_not_their_path(tmp_path: Path) -> None:
    paths = [
        checkpoint(tmp_path / "first"),
        checkpoint(tmp_path / "weights", weights="others"),
        checkpoint(tmp_path / "config", config='{"rope_theta": 10000}'),
        checkpoint(tmp_path / "same"),
    ]
    assert found_in_turn(tmp_path, *((path, str(path)) for path in paths)) == [0, 0, 0, 2]


def test_a_served_name_that_is_no_path_names_a_model_of_its_own(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    assert found_in_turn(tmp_path, (path, str(path)), (path, "mine"), (path, str(path))) == [0, 0, 2]


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": {"url": ""}}, "must name the store"),
        ({"url": "no-such-store:"}, "must begin with one of"),
        ({"extra": {"interface_v1": 0}}, "interface_v1"),
        ({"extra": {"uri": "file:x"}}, "no setting uri; did you mean url"),
        ({"extra": {"deadline_s": "soon"}}, "deadline_s"),
        ({"extra": {"deadline_s": -1}}, "deadline_s"),
        ({"extra": {"generation": -1}}, "generation"),
        ({"extra": {"bounce_bytes": "much"}}, "bounce_bytes"),
        ({"extra": {"revision": 7}}, "revision"),
        ({"should_split_heads": True}, "tp_lcm_size"),
        ({"dcp_size": 2}, "dcp_size"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_is_refused_when_the_engine_starts(
    start: Start, change: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**change)


def test_calls_that_make_no_sense_are_misses(start: Start) -> None:
    engine, keys = start(), hashes(2)
    pool = engine.pools["kv"]
    storage = engine.storage
    assert storage.batch_set_v1(["no hash", *keys], pool.indices(range(3))) == [False] * 3
    assert storage.batch_set_v1(["abcd"], pool.indices([0])) == [False]
    assert storage.batch_get_v1(keys, pool.indices([0])) == [False, False]
    assert storage.batch_get_v1(keys, pool.indices(range(2)) + 1) == [False, False]
    assert storage.batch_get_v1(keys, pool.indices([0, SLOTS])) == [False, False]
    assert storage.batch_exists(["no hash"]) == 0
    unknown = SglangTransfer("nobody", pool.indices(range(2)), keys)
    assert storage.batch_set_v2([unknown]) == {"nobody": [False, False]}
    assert storage.batch_get_v2([SglangTransfer(PoolNames.KV, None, keys)]) == {"kv": [False, False]}
    assert storage.batch_exists_v2(keys, [unknown]).restorable_prefix_pages == []
    assert storage.batch_set_v1(keys, pool.indices(range(2))) == [True, True]


def test_the_interface_before_zero_copy_stores_nothing(start: Start) -> None:
    storage, key = start().storage, hashes(1)[0]
    assert not storage.set(key, torch.zeros(4))
    assert not storage.batch_set([key], [torch.zeros(4)])
    assert storage.get(key) is None
    assert storage.batch_get([key]) == [None]


def open_broken(rest: str, bytes_max: int | None) -> Store:
    """Open a store with a bug: it raises what no store should."""
    store = ScriptedStorage()
    store.before = dict.fromkeys((Method.EXISTS, Method.GET), raising(RuntimeError("a bug of the store")))
    return store


def test_a_store_that_raises_anything_is_a_miss(start: Start) -> None:
    engine, keys = start(url=f"{__name__}:open_broken"), hashes(2)
    indices = engine.pools["kv"].indices(range(2))
    assert engine.storage.batch_set_v1(keys, indices) in ([False, False], [True, True])
    assert engine.storage.batch_get_v1(keys, indices) == [False, False]
    assert engine.storage.batch_exists(keys) == 0
    assert engine.storage.batch_exists_v2(keys, []).kv_hit_pages == 0
    assert engine.storage.batch_get_v2(engine.transfers(keys, range(2), kv="kv")) == {"kv": [False, False]}


def test_after_close_everything_is_a_miss_and_no_view_is_left(start: Start) -> None:
    engine, keys = start(), hashes(2)
    indices = engine.pools["kv"].indices(range(2))
    engine.storage.batch_set_v1(keys, indices)
    engine.storage.close()
    engine.storage.close()
    assert engine.storage.batch_get_v1(keys, indices) == [False, False]
    assert engine.storage.batch_exists(keys) == 0


# ---- operation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_tokens", "is_warned"), [(1, True), (64, False)])
def test_pages_of_few_tokens_are_warned_of(
    start: Start, page_tokens: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="unified_cache"):
        start({"kv": TensorPool(SLOTS, page_size=page_tokens)})
    assert f"stores pages of {page_tokens} tokens, kv (64 bytes) in file:" in caplog.text
    assert ("start SGLang with --page-size 64" in caplog.text) == is_warned


def test_the_engine_is_told_pages_and_rates_once(start: Start) -> None:
    engine, keys = start({"kv": TensorPool(SLOTS), "deepseek_v4_c4": LogicalPool(SLOTS)}), hashes(3)
    engine.storage.batch_set_v2(engine.transfers(keys, range(3), deepseek_v4_c4="kv"))
    indices = engine.pools["kv"].indices(range(3))
    engine.storage.batch_set_v1(keys, indices)
    engine.storage.batch_get_v1(keys, indices)
    told = engine.storage.get_stats()
    assert (told.prefetch_pgs, told.backup_pgs) == ([3], [3])
    assert told.prefetch_bandwidth[0] > 0
    assert engine.storage.get_stats().prefetch_pgs == []
