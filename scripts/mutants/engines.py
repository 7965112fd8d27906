"""Mistakes in how engines' own memory is treated."""

from scripts.mutants.mutant import Mutant

ENGINE_STORE_TESTS = (
    "tests/unit/integrations/engine_store/test_store_faults.py",
    "tests/unit/integrations/engine_store/test_callers.py",
)
"""What must catch a mistake in how engines' own memory is treated."""

EXACTNESS_TESTS = ("tests/e2e/test_transformers_exact.py",)

ENGINES_MUTANTS = [
    Mutant(
        "a call returns while a thread still fills the engine's rows",
        "integrations/engine_store/store.py",
        "            if call.is_zero_copy:\n                self._threads.withdraw(bounded)\n",
        "            if False:\n                self._threads.withdraw(bounded)\n",
        tests=("tests/unit/integrations/engine_store/test_parallel_parts.py",),
    ),
    Mutant(
        "each call to the store that one look-up makes has a deadline of its own",
        "integrations/engine_store/pools.py",
        "self._store.exists(labels, due_s)",
        "self._store.exists(labels)",
        tests=("tests/unit/integrations/engine_store/test_one_deadline.py",),
    ),
    Mutant(
        "each step of a call that a store answers in part has a deadline of its own",
        "integrations/engine_store/calls.py",
        "            if Answer.UNAVAILABLE in answers:\n",
        "            if False:\n",
        tests=("tests/unit/integrations/engine_store/test_one_deadline.py",),
    ),
    Mutant(
        "a late read fills the engine's rows",
        "integrations/engine_store/calls.py",
        "            self._is_revoked, self._pages = True, ()\n",
        "",
        ENGINE_STORE_TESTS,
    ),
    Mutant(
        "rows that were read from memory are believed unseen",
        "storage_backends/directory/page_reads.py",
        "== object_bytes and verify_buffers(buffers, label) is None",
        "== object_bytes",
        ("tests/unit/storage_backends/directory/test_memory_reads.py",),
    ),
    Mutant(
        "a bounce buffer of a late call is reserved again",
        "integrations/engine_store/store.py",
        "            self._bounce.release(buffer, user)\n",
        "            self._bounce.release(buffer)\n",
        ENGINE_STORE_TESTS,
    ),
    Mutant(
        "a registration that failed is not made up",
        "integrations/engine_store/calls.py",
        "                raise\n            with self._guard:\n                self.taken.add(identity)\n",
        "                self.taken.add(identity)\n                raise\n            with self._guard:\n"
        "                self.taken.add(identity)\n",
        ENGINE_STORE_TESTS,
    ),
    Mutant(
        "a store that somebody must mend is tried every few seconds",
        "storage_backends/common/breaker.py",
        "self._pauses.pause_s(count) if passes else MENDED_PAUSE_S",
        "self._pauses.pause_s(count)",
        ENGINE_STORE_TESTS,
    ),
    Mutant(
        "a window comes back without its oldest row",
        "integrations/transformers/pages.py",
        "rows if self.rows_max is None else rows[-self.rows_max :]",
        "rows if self.rows_max is None else torch.cat((rows[-self.rows_max :][:1] * 0, rows[-self.rows_max :][1:]))",
        EXACTNESS_TESTS,
    ),
    Mutant(
        "a page of state is that of another boundary",
        "integrations/transformers/pages.py",
        "per_layer[strand.layer][strand.part] = strand.join(tensor[at])",
        "per_layer[strand.layer][strand.part] = strand.join(tensor[at - strand.is_checkpoint])",
        EXACTNESS_TESTS,
    ),
]
