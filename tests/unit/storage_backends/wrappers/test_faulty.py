"""The faulty store: every fault is one that a caller sees, counted, and the same for the same seed."""

import random
from collections.abc import Callable

import pytest

from tests.support.faulty_storage import POISON, FaultyStorage, SeededFaults, StorageFault
from tests.support.wrappers import blank, scripted, sealed
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import verify_buffers
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, sealed_page


def filled(numbers: range) -> MemoryStorage:
    backend = MemoryStorage()
    backend.put(sealed(numbers), Level.CACHED)
    return backend


def is_front_and_poison(content: bytes, sound: bytes) -> bool:
    good_bytes = len(content.rstrip(bytes([POISON])))
    return good_bytes <= PAGE_BYTES // 2 and content[:good_bytes] == sound[:good_bytes]


def is_one_bit_off(content: bytes, sound: bytes) -> bool:
    return (int.from_bytes(content) ^ int.from_bytes(sound)).bit_count() == 1


def is_another_page(content: bytes, sound: bytes) -> bool:
    return content != sound and content in [bytes_of(page) for page in sealed(range(3))]


@pytest.mark.parametrize(
    ("call", "fault", "is_damage"),
    [
        (1, StorageFault.SHORT_READ, is_front_and_poison),
        (1, StorageFault.FLIPPED_BIT, is_one_bit_off),
        (1, StorageFault.MISDIRECTED_READ, is_another_page),
        (0, StorageFault.TORN_WRITE, is_front_and_poison),
    ],
)
def test_a_damaged_page_counts_as_a_hit_and_does_not_verify(
    call: int, fault: StorageFault, is_damage: Callable[[bytes, bytes], bool]
) -> None:
    for seed in range(20):
        storage = scripted({call: fault}, seed=seed)
        assert storage.put(sealed(range(3)), Level.CACHED) == [Answer.STORED] * 3
        found = [blank_page(label(number), cuts=(1, 700)) for number in range(3)]
        assert storage.get(found) == [Answer.HIT] * 3
        damaged = [page for page in found if verify_buffers(page.buffers, page.label) is not None]
        assert all(is_damage(bytes_of(page), bytes_of(sealed_page(page.label))) for page in damaged)
        assert storage.fired_count == {fault: 1}
        assert len(damaged) == 1


def test_a_lost_write_is_acknowledged_and_not_there() -> None:
    backend = filled(range(2))
    storage = scripted({0: StorageFault.LOST_WRITE}, backend)
    assert storage.put(sealed([0, 2, 1, 2]), Level.CACHED) == [Answer.STORED] * 4
    assert backend.exists([label(number) for number in range(3)]) == [Answer.HIT, Answer.HIT, Answer.MISS]
    assert storage.fired_count == {StorageFault.LOST_WRITE: 1}


def test_a_partial_write_stores_the_first_pages_and_raises() -> None:
    backend = MemoryStorage()
    storage = scripted({0: StorageFault.PARTIAL_WRITE}, backend)
    with pytest.raises(StorageError, match="of 5 pages") as raised:
        storage.put(sealed(range(5)), Level.CACHED)
    assert raised.value.retryable
    stored = backend.exists([label(number) for number in range(5)])
    assert stored == sorted(stored, key=bool, reverse=True)
    assert stored[0]
    assert not stored[-1]


@pytest.mark.parametrize("fault", list(StorageFault)[3:])
def test_a_fault_that_would_make_no_difference_does_not_strike(fault: StorageFault) -> None:
    plan = SeededFaults({fault: 1.0}, random.Random(1))
    storage = FaultyStorage(filled(range(1)), plan, random.Random(1))
    assert storage.put(sealed([0]), Level.CACHED) == [Answer.STORED]
    assert storage.get(blank([7])) == [Answer.MISS]
    assert (storage.put([], Level.CACHED), storage.get([])) == ([], [])
    assert storage.exists([label(0)]) == [Answer.HIT]
    if fault not in (StorageFault.SHORT_READ, StorageFault.FLIPPED_BIT):  # there is no page in place of which to read
        (found,) = blank([0])
        assert storage.get([found]) == [Answer.HIT]
        assert bytes_of(found) == bytes_of(sealed_page(label(0)))
    assert storage.fired_count == {}


def history(storage: Store, calls_count: int) -> list[object]:
    seen: list[object] = []
    for number in range(calls_count):
        found = blank([number % 7, number % 5])
        try:
            seen.append(storage.put(sealed([number % 7, number % 11]), Level.CACHED))
            seen.append((storage.get(found), [bytes_of(page) for page in found]))
        except StorageError as error:
            seen.append(str(error))
    return seen


def test_the_same_seed_gives_the_same_faults_at_the_rates_asked_for() -> None:
    lying = set(StorageFault) - {StorageFault.DELAY, StorageFault.HANG}
    stores = [
        FaultyStorage(
            MemoryStorage(20 * PAGE_BYTES),
            SeededFaults(dict.fromkeys(lying, 0.1), random.Random(seed)),
            random.Random(2),
        )
        for seed in (1, 1, 2)
    ]
    one, same, other = (history(storage, 400) for storage in stores)
    assert one == same
    assert one != other
    assert set(stores[0].fired_count) >= lying - {StorageFault.LOST_WRITE, StorageFault.TORN_WRITE}
    assert 0.07 < stores[0].fired_count[StorageFault.FAIL] / stores[0].calls_count < 0.13
