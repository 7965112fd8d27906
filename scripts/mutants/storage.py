"""Mistakes in what names, seals, verifies and lists stored pages."""

from scripts.mutants.mutant import Mutant

CALLS_TESTS = ("tests/unit/storage_backends/test_bounded_calls.py",)
"""What must catch a mistake in how a call that may hang is left."""

CODED_TESTS = ("tests/unit/storage_backends/wrappers/test_encrypted.py", "tests/e2e/test_coded_stores.py")
"""What must catch a mistake in whose key is used, and for how long."""

STORAGE_MUTANTS = [
    Mutant(
        "what tensors hold of a page is left out of the digest",
        "core/pool.py",
        "{pool.page_bytes}{pool.tensors and f' {pool.tensors}'}",
        "{pool.page_bytes}",
        ("tests/unit/core/test_identity.py",),
    ),
    Mutant(
        "work that was given up begins its next call to the store",
        "storage_backends/common/bounded_call.py",
        "        call.step = self\n        if call.is_given_up:\n",
        "        call.step = self\n        if False:\n",
        CALLS_TESTS,
    ),
    Mutant(
        "buffers of a call that was given up are free at once",
        "storage_backends/common/bounded_call.py",
        "        return state is CallState.RETURNED or state is CallState.LET_GO",
        "        return state is CallState.RETURNED or state is CallState.GIVEN_UP or state is CallState.LET_GO",
        CALLS_TESTS,
    ),
    Mutant(
        "a thread that was replaced goes on when its store returns",
        "storage_backends/common/bounded_call.py",
        "is_needed = self._threads_count - len(self._lost) <= self._threads_max",
        "is_needed = True",
        CALLS_TESTS,
    ),
    Mutant(
        "a deferrable call that hangs keeps its place among the deferrable ones",
        "storage_backends/common/bounded_call.py",
        "            self._lost.add(call)\n            self._deferred.discard(call)\n",
        "            self._lost.add(call)\n",
        CALLS_TESTS,
    ),
    Mutant(
        "what waits for threads that are all lost waits on",
        "storage_backends/common/bounded_call.py",
        "return self._dropped() if self._threads_count == len(self._lost) else []",
        "return []",
        CALLS_TESTS,
    ),
    Mutant(
        "a call that hangs does not count for the breaker until it returns",
        "storage_backends/wrappers/guard.py",
        "        self.breaker.record_outcome(admission, failed=True)\n",
        "        pass\n",
        ("tests/unit/storage_backends/wrappers/test_guard.py",),
    ),
    Mutant(
        "each try of a call has the whole deadline anew",
        "storage_backends/wrappers/guard.py",
        "        left_s = due_s - self._clock()\n",
        "        left_s = self.deadline_s\n",
        ("tests/unit/storage_backends/wrappers/test_guard.py",),
    ),
    Mutant(
        "tries of a client of the service do not share the time of their caller",
        "storage_backends/remote/store.py",
        "min(total_s, time_left_s())",
        "total_s",
        ("tests/unit/storage_backends/remote/test_storage.py",),
    ),
    Mutant(
        "a page from storage is believed",
        "storage_backends/wrappers/layer.py",
        "verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)",
        "None",
    ),
    Mutant(
        "whose key opens a page is what the manifest in the store says",
        "storage_backends/wrappers/coded.py",
        "manifest is not None and is_sound(manifest, identity):",
        "manifest is not None:",
        CODED_TESTS,
    ),
    Mutant(
        "a page of nobody known is everybody's",
        "storage_backends/wrappers/coded.py",
        "stored, page, self._owners.get(page.label.identity))",
        'stored, page, self._owners.get(page.label.identity, "*"))',
        CODED_TESTS,
    ),
    Mutant(
        "a process that only reads keeps the keys it has",
        "storage_backends/wrappers/page_keys.py",
        'key_id: bytes) -> PageCipher | None:\n        """Return the key of that ID for pages of an identity; '
        'None where its owner has no such key."""\n        self._refresh()\n',
        "key_id: bytes) -> PageCipher | None:\n",
        CODED_TESTS,
    ),
    Mutant(
        "what no key opened stays a miss when its key comes",
        "storage_backends/wrappers/coded.py",
        "                self._unreadable.clear()\n\n",
        "                pass\n\n",
        CODED_TESTS,
    ),
    Mutant(
        "an answer that no store may give is a miss",
        "storage_backends/wrappers/layer.py",
        "            left_count -= answers.count(answer)\n",
        "            left_count = 0\n",
        tests=("tests/unit/storage_backends/wrappers/test_answers.py",),
    ),
    Mutant(
        "a checksum goes on after a gap",
        "core/seal.py",
        "            self._end = -1\n            return\n",
        "            pass\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "a page that is read again is added to what was read before",
        "core/seal.py",
        "            self._stream = xxh3_64()\n            self._end = 0\n",
        "            self._stream = self._stream or xxh3_64()\n            self._end = 0\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "a fact is taken for a component",
        "core/pool.py",
        'domain += b"-facts-%d" % len(self.facts)',
        "pass",
        ("tests/unit/core/test_identity.py",),
    ),
    Mutant(
        "pages are told apart in a listing of any order",
        "storage_backends/offline/listing.py",
        "if key <= last:",
        "if False:",
        ("tests/unit/offline/test_upkeep.py",),
    ),
    Mutant(
        "an unknown span needs nothing",
        "storage_backends/offline/copying.py",
        "needed[key] |= (self._have.get(key, 0) | self._there.get(key, 0)) & bits",
        "pass",
        ("tests/unit/offline/test_copying.py",),
    ),
    Mutant(
        "a full disk declines what an eviction would make room for",
        "storage_backends/file/quota.py",
        "        is_over = not self._know()\n",
        "        is_over = True\n",
        tests=("tests/unit/storage_backends/directory/test_full_disk.py",),
    ),
    Mutant(
        "a store whose cap shrank keeps what is oldest",
        "storage_backends/common/lru.py",
        "self.victims(taken_bytes, keep) if taken_bytes < unfit_bytes else ([], 1)",
        "([], taken_bytes)",
        tests=("tests/contract/test_storage_contract.py", "tests/sim/test_simulation.py"),
    ),
    Mutant(
        "a packed store below its reserve refuses what needs no new byte",
        "storage_backends/packed/store.py",
        "new_bytes + left_bytes) if new_bytes else 0",
        "new_bytes + left_bytes)",
        tests=("tests/unit/storage_backends/directory/test_full_disk.py",),
    ),
    Mutant(
        "a cap counts lengths, not what the file system takes",
        "storage_backends/file/quota.py",
        "self._lru = StoreLru(bytes_max, self.taken_bytes)",
        "self._lru = StoreLru(bytes_max)",
        tests=("tests/unit/storage_backends/file/test_storage.py",),
    ),
    Mutant(
        "a process that is not alone in a directory sweeps nothing",
        "storage_backends/file/quota.py",
        "            if not is_alone:\n",
        "            if False:\n",
        tests=("tests/unit/storage_backends/file/test_sharing.py",),
    ),
    Mutant(
        "who came into a directory and went is not noticed",
        "storage_backends/file/quota.py",
        "return before == (self._count, True) and self.is_alone",
        "return self.is_alone",
        tests=("tests/unit/storage_backends/file/test_sharing.py",),
    ),
    Mutant(
        "what is stored during a sweep is not counted",
        "storage_backends/file/quota.py",
        "                self._sweep.changes[label] = object_bytes\n",
        "                pass\n",
        tests=("tests/unit/storage_backends/file/test_sharing.py",),
    ),
    Mutant(
        "a link in the place of a directory is followed",
        "storage_backends/directory/root.py",
        "                foreign.append(place)\n",
        "                pass\n",
        tests=("tests/unit/storage_backends/file/test_storage.py",),
    ),
]
