"""The linker's host tier and what it moves from and to a store, without SGLang: look-ups, pins, recency, fetches."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedStorage, StorageFault
from tests.support.waiting import wait_until
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig
from unified_cache.integrations.engine_store.pools import AffineRows, BundleName, EnginePools
from unified_cache.integrations.sglang.linker_tier import LOOKUP_PIN_S, LinkerHostTier
from unified_cache.integrations.sglang.settings import LinkerSettings
from unified_cache.integrations.sglang.tier_storage import ASK_AGAIN_S, ASKS_MAX, ComponentBundles, TierStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers import Method

PAGE_BYTES = 48


def chain(count: int, name: str = "") -> list[str]:
    return [hashlib.sha256(f"{name}{number}".encode()).hexdigest() for number in range(count)]


def hold(tier: LinkerHostTier, keys: Mapping[str, Sequence[str]]) -> None:
    slots = tier.reserve({name: len(of) for name, of in keys.items()})
    assert slots is not None
    assert tier.publish(keys, slots, tier.clears_count)


def naive_ends(keys: Sequence[str], held: Mapping[str, set[str]], spans: Mapping[str, int]) -> list[int]:
    return [
        end
        for end in range(1, len(keys) + 1)
        if all(set(keys[max(0, end - span) : end]) <= held[name] for name, span in spans.items())
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_lookup_tells_every_end_that_can_be_restored_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    tier, keys = LinkerHostTier({"kv": 64, "swa": 64, "mamba": 64}), chain(30)
    held = {name: {key for key in keys if rng.random() < 0.85} for name in ("kv", "swa", "mamba")}
    held["kv"] |= set(keys[: rng.randrange(30)])
    for name, of in held.items():
        hold(tier, {name: [key for key in keys if key in of]})
    spans = {"kv": SPAN_ALL, "swa": rng.randint(1, 6), "mamba": 1}
    assert tier.lookup("r", keys, spans) == naive_ends(keys, held, spans)


def test_what_a_lookup_has_told_of_stays_until_the_next_one() -> None:
    tier, old, new = LinkerHostTier({"kv": 8}), chain(4, "old"), chain(8, "new")
    hold(tier, {"kv": old})
    assert tier.lookup("r", old, {"kv": SPAN_ALL}) == [1, 2, 3, 4]
    hold(tier, {"kv": new[:4]})
    assert tier.reserve({"kv": 5}) is None
    assert tier.lacking("kv", old) == []
    tier.lookup("r", chain(2, "another"), {"kv": SPAN_ALL})
    hold(tier, {"kv": new})
    assert tier.lacking("kv", old) == old


def test_pages_that_an_offload_finds_here_do_not_go_for_its_others() -> None:
    tier, keys = LinkerHostTier({"kv": 2}), chain(2)
    hold(tier, {"kv": keys[:1]})
    hold(tier, {"kv": chain(1, "another")})
    assert tier.lacking("kv", keys) == keys[1:]
    hold(tier, {"kv": keys[1:]})
    assert tier.holds({"kv": keys})


def test_pins_of_a_request_that_never_comes_back_end() -> None:
    clock = ManualClock()
    tier, keys = LinkerHostTier({"kv": 4}, clock), chain(4)
    hold(tier, {"kv": keys})
    tier.lookup("gone", keys, {"kv": SPAN_ALL})
    assert tier.reserve({"kv": 1}) is None
    clock.now_s += LOOKUP_PIN_S
    tier.lookup("another", chain(1, "x"), {"kv": SPAN_ALL})
    assert tier.reserve({"kv": 4}) is not None


def test_lookups_of_many_requests_pin_a_part_of_the_tier_and_the_oldest_pins_go() -> None:
    tier = LinkerHostTier({"kv": 16})
    prompts = [chain(4, f"prompt {number}") for number in range(4)]
    for number, keys in enumerate(prompts):
        hold(tier, {"kv": keys})
        assert tier.lookup(f"r{number}", keys, {"kv": SPAN_ALL}) == [1, 2, 3, 4]
    assert tier.reserve({"kv": 8}) is not None
    assert [len(tier.lacking("kv", keys)) for keys in prompts] == [4, 4, 0, 0]


def test_a_load_keeps_its_pages_whatever_other_lookups_do() -> None:
    tier, keys = LinkerHostTier({"kv": 4}), chain(4)
    hold(tier, {"kv": keys})
    tier.lookup("r", keys, {"kv": SPAN_ALL})
    taken = tier.take("r", {"kv": keys})
    assert taken is not None
    tier.lookup("r", chain(1, "x"), {"kv": SPAN_ALL})
    assert tier.reserve({"kv": 1}) is None
    tier.unpin(taken)
    assert tier.reserve({"kv": 4}) is not None
    assert tier.take("r", {"kv": keys}) is None


def test_the_last_pages_of_a_prompt_go_before_its_first() -> None:
    tier, keys = LinkerHostTier({"kv": 8}), chain(8)
    hold(tier, {"kv": keys})
    hold(tier, {"kv": chain(3, "others")})
    assert tier.lacking("kv", keys) == keys[5:]
    tier.lookup("r", keys, {"kv": SPAN_ALL})
    tier.lookup("r", chain(1, "x"), {"kv": SPAN_ALL})
    hold(tier, {"kv": chain(5, "more")})
    assert tier.lacking("kv", keys) == keys[3:]


def test_the_head_of_a_prompt_stays_while_its_tail_is_in_use() -> None:
    tier, keys = LinkerHostTier({"kv": 8}), chain(8)
    tier.lookup("r", keys[:6], {"kv": SPAN_ALL})
    for part in (keys[:4], keys[4:6]):  # as two nodes of the engine's tree
        hold(tier, {"kv": part})
        assert tier.holds({"kv": part})
    hold(tier, {"kv": chain(4, "others")})
    assert tier.lacking("kv", keys[:6]) == keys[4:6]
    tier.lookup("r", keys[3:], {"kv": SPAN_ALL})  # the engine's device has the others
    tier.lookup("r", chain(1, "x"), {"kv": SPAN_ALL})
    hold(tier, {"kv": chain(5, "more")})
    assert tier.lacking("kv", keys[:4]) == keys[3:4]


def test_pages_of_one_call_are_held_all_or_none() -> None:
    tier, keys = LinkerHostTier({"kv": 4, "swa": 2}), chain(3)
    assert tier.reserve({"kv": 3, "swa": 3}) is None
    assert tier.pages_counts() == {"kv": (0, 4), "swa": (0, 2)}
    slots = tier.reserve({"kv": 3, "swa": 1})
    assert slots is not None
    assert tier.lookup("r", keys, {"kv": SPAN_ALL}) == []
    tier.clear()
    assert not tier.publish({"kv": keys, "swa": keys[-1:]}, slots, 0)
    assert tier.pages_counts() == {"kv": (0, 4), "swa": (0, 2)}


@pytest.mark.parametrize("seed", range(10))
def test_every_slot_is_free_or_held_once_nobody_uses_any(seed: int) -> None:
    rng = random.Random(seed)
    tier, keys = LinkerHostTier({"kv": 12}), chain(20)
    pinned = []
    for number in range(300):
        some = rng.sample(keys, rng.randint(1, 5))
        step = rng.randrange(5)
        if step == 0:
            slots = tier.reserve({"kv": len(some)})
            if slots is not None:
                tier.publish({"kv": some}, slots, tier.clears_count - rng.randrange(2))
        elif step == 1:
            tier.lookup(f"r{rng.randrange(4)}", some, {"kv": SPAN_ALL})
        elif step == 2:
            pinned.append({"kv": tier.pin_held("kv", some)[1]})
        elif step == 3 and pinned:
            tier.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif number % 50 == 0:
            tier.clear()
    for slots in pinned:
        tier.unpin(slots)
    assert sum(tier.pages_counts()["kv"]) == 12
    tier.clear()
    assert tier.pages_counts() == {"kv": (0, 12)}


class FaultOfMethod:
    """A plan that gives every call of one method the same fault, and counts these calls."""

    def __init__(self, method: Method, fault: StorageFault) -> None:
        self.method, self.fault = method, fault
        self.calls_count = 0

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        self.calls_count += method is self.method
        return self.fault if method is self.method else None


def faulty_store(method: Method, fault: StorageFault) -> ScriptedStorage:
    return ScriptedStorage(MemoryStorage(), FaultOfMethod(method, fault), random.Random(1))


class Linked:
    """A host tier of two components over a store, and the memory of its slots."""

    def __init__(self, store: EngineStore, pages: int = 64) -> None:
        self.tier = LinkerHostTier({"kv": pages, "swa": pages})
        self.pools = EnginePools(store, name_of)
        self.memory: dict[str, np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = {}
        for pool in ("kv", "swa", "state"):
            memory = self.memory[pool] = np.zeros((pages + 1, PAGE_BYTES), np.uint8)
            self.pools.add(pool, AffineRows([memory.ctypes.data], [PAGE_BYTES], [PAGE_BYTES], pages + 1))
        bundles = {"kv": (("kv",),), "swa": (("state", "swa"),)}
        components = {name: ComponentBundles(each, each) for name, each in bundles.items()}
        self.clock = ManualClock()
        self.storage = TierStorage(self.tier, store, self.pools, components, {"kv": pages, "swa": pages}, self.clock)
        self.spans = {"kv": SPAN_ALL, "swa": 2}

    def offload(self, keys: Sequence[str]) -> None:
        """Hold a chain of pages in both components, each with bytes of its own, and store them."""
        named = {"kv": keys, "swa": keys}
        slots = self.tier.reserve({"kv": len(keys), "swa": len(keys)})
        assert slots is not None
        for pool, memory in self.memory.items():
            for key, slot in zip(keys, slots["kv" if pool == "kv" else "swa"], strict=True):
                memory[slot] = content(pool, key)
        self.tier.publish(named, slots, self.tier.clears_count)
        assert self.tier.holds(named)
        self.storage.store(named)

    def forget(self) -> None:
        """Forget the host tier, once all is stored, and overwrite it."""
        assert wait_until(lambda: not self.storage.backlog, 10)
        self.tier.clear()
        self.storage.forget()
        for memory in self.memory.values():
            memory[:] = 0xA5

    def fetch(self, keys: Sequence[str], rid: str = "r") -> list[int]:
        """Look up, fetch, and look up again."""
        ends = self.tier.lookup(rid, keys, self.spans)
        call = self.storage.fetch(rid, keys, self.spans, ends[-1] if ends else 0)
        assert call is None or call.wait(30)
        return self.tier.lookup(rid, keys, self.spans)

    def wrong(self, keys: Sequence[str], end: int) -> int:
        """Return how many rows that a resume at ``end`` reads are not what their keys name."""
        taken = self.tier.take("r", {"kv": keys[:end], "swa": keys[max(0, end - 2) : end]})
        assert taken is not None
        rows = [("kv", "kv", keys[:end])] + [(pool, "swa", keys[max(0, end - 2) : end]) for pool in ("swa", "state")]
        wrong = sum(
            bool((self.memory[pool][slot] != content(pool, key)).any())
            for pool, name, of in rows
            for key, slot in zip(of, taken[name], strict=True)
        )
        self.tier.unpin(taken)
        return wrong

    def close(self) -> None:
        self.storage.close(10)
        self.pools.close()


def content(pool: str, key: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(hashlib.sha384(f"{pool} {key}".encode()).digest(), np.uint8)


def name_of(pools: tuple[str, ...], pages_bytes: Sequence[int]) -> BundleName:
    name = "_".join(pools)
    layout = ModelLayout(16, (Component(name, SPAN_ALL, (PoolSpec(name, sum(pages_bytes)),)),))
    return BundleName(Identity("model"), layout)


@pytest.fixture
def linked() -> Iterator[Linked]:
    with EngineStore.open("memory:") as store:
        made = Linked(store)
        yield made
        made.close()


def test_what_was_offloaded_is_fetched_from_the_store_byte_by_byte(linked: Linked) -> None:
    keys = chain(10)
    linked.offload(keys)
    linked.forget()
    assert linked.fetch(keys + chain(3, "unknown"))[-1] == 10
    assert linked.wrong(keys, 10) == 0
    # Of a window only what the end needs was read.
    assert linked.tier.pages_counts() == {"kv": (10, 54), "swa": (2, 62)}
    assert linked.storage.counts().fetched == 12


def test_a_fetch_goes_on_from_what_the_host_tier_holds(linked: Linked) -> None:
    keys = chain(10)
    linked.offload(keys)
    linked.forget()
    assert linked.fetch(keys[:4])[-1] == 4
    assert linked.fetch(keys, "another")[-1] == 10
    assert linked.storage.counts().fetched == 4 + 2 + 6 + 2
    assert linked.wrong(keys, 10) == 0


def test_a_request_is_answered_by_the_first_fetch_of_each_of_its_prompts(linked: Linked) -> None:
    keys = chain(4)
    assert linked.storage.fetch("r", keys, linked.spans, 0) is not None
    assert linked.storage.fetch("r", keys, linked.spans, 0) is None
    assert linked.storage.fetch("r", keys[:3], linked.spans, 0) is not None
    assert linked.storage.fetch("another", keys, linked.spans, 0) is not None


@pytest.mark.parametrize(("pauses", "asks"), [(0, 1), (1, 2), (ASKS_MAX + 2, ASKS_MAX)])
def test_a_request_that_waits_asks_a_store_that_fails_again_after_a_pause_some_times(pauses: int, asks: int) -> None:
    plan = FaultOfMethod(Method.EXISTS, StorageFault.FAIL)
    faulty = ScriptedStorage(MemoryStorage(), plan, random.Random(1))
    config = EngineStoreConfig(guard=GuardConfig(breaker_failures_max=1_000))
    with EngineStore.opened_by(lambda: faulty, config) as store:
        linked, keys = Linked(store), chain(4)
        assert linked.fetch(keys) == []
        calls_count = plan.calls_count
        for _ in range(pauses):
            linked.clock.now_s += ASK_AGAIN_S
            for _ in range(3):
                linked.fetch(keys)
        linked.storage.close(30)
        assert plan.calls_count == asks * calls_count > 0
        linked.close()
        faulty.release()


def test_what_another_engine_has_stored_meanwhile_is_found_by_a_request_that_waits(linked: Linked) -> None:
    keys = chain(4)
    assert linked.fetch(keys) == []
    linked.offload(keys)
    assert wait_until(lambda: not linked.storage.backlog, 10)
    linked.tier.clear()
    assert linked.fetch(keys) == []
    linked.clock.now_s += ASK_AGAIN_S
    linked.fetch(keys)
    assert wait_until(lambda: linked.tier.lookup("r", keys, linked.spans) == [4], 10)


def test_what_another_rank_writes_is_not_written(linked: Linked) -> None:
    with EngineStore.open("memory:") as store:
        other = Linked(store)
        idle = {name: ComponentBundles(((name,),), ()) for name in ("kv", "swa")}
        other.storage = TierStorage(other.tier, store, other.pools, idle, {"kv": 64, "swa": 64})
        other.offload(chain(3))
        assert (other.storage.backlog, other.storage.counts().stored) == (0, 0)
        assert other.tier.reserve({"kv": 64, "swa": 64}) is not None
        other.close()


def test_a_prompt_that_takes_most_of_the_host_tier_is_stored(linked: Linked) -> None:
    keys = chain(60)
    linked.offload(keys)
    linked.forget()
    assert (linked.storage.counts().stored, linked.storage.counts().dropped) == (120, 0)
    assert linked.fetch(keys)[-1] == 60


def test_a_store_that_hangs_holds_up_nobody_and_what_is_too_much_for_it_is_dropped() -> None:
    faulty = faulty_store(Method.PUT, StorageFault.HANG)
    config = EngineStoreConfig(guard=GuardConfig(deadline_s=0.2))
    with EngineStore.opened_by(lambda: faulty, config) as store:
        linked = Linked(store)
        prompts = [chain(4, f"prompt {number}") for number in range(40)]
        for keys in prompts:
            linked.offload(keys)
            assert linked.tier.lookup("r", keys, linked.spans) == [1, 2, 3, 4]
        assert linked.storage.counts().dropped > 0
        assert wait_until(lambda: not linked.storage.backlog, 30)
        counts = linked.storage.counts()
        assert counts.stored == 0
        assert counts.not_stored + counts.dropped == 40 * 8
        linked.forget()
        assert linked.tier.pages_counts() == {"kv": (0, 64), "swa": (0, 64)}
        linked.close()
        faulty.release()


@pytest.mark.parametrize("fault", [StorageFault.FLIPPED_BIT, StorageFault.SHORT_READ, StorageFault.FAIL])
def test_pages_that_do_not_verify_are_not_found(fault: StorageFault) -> None:
    faulty = faulty_store(Method.GET, fault)
    with EngineStore.opened_by(lambda: faulty) as store:
        linked, keys = Linked(store), chain(6)
        linked.offload(keys)
        linked.forget()
        assert linked.fetch(keys) == []
        assert linked.storage.counts().not_fetched
        linked.forget()
        assert linked.tier.pages_counts() == {"kv": (0, 64), "swa": (0, 64)}
        linked.close()
        faulty.release()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"url": "file:/kv"}, "host_bytes must say"),
        ({"host_bytes": "1GB"}, "url must name the store"),
        ({"url": "file:/kv", "host_bytes": "1GB", "host_byte": 1}, "host_byte"),
        ({"url": "file:/kv", "host_bytes": "1GB", "lookup_wait_s": 60}, "lookup_wait_s"),
    ],
)
def test_a_wrong_setting_is_named(extra: Mapping[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LinkerSettings.of(extra)
