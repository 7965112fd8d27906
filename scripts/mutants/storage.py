"""Mistakes in what names, seals, verifies and lists stored pages."""

from scripts.mutants.mutant import Mutant

__all__ = ["STORAGE_MUTANTS"]

STORAGE_MUTANTS = [
    Mutant(
        "a page from storage is believed",
        "storage_backends/verified.py",
        "verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)",
        "None",
    ),
    Mutant(
        "an answer that no store may give is a miss",
        "storage_backends/wrappers/checked.py",
        "        return allowed.issuperset(answers)\n",
        "        return True\n",
        tests=("tests/unit/storage_backends/wrappers/test_checked.py",),
    ),
    Mutant(
        "a checksum goes on after a gap",
        "seal.py",
        "            self._end = -1\n            return\n",
        "            pass\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "a page that is read again is added to what was read before",
        "seal.py",
        "            self._stream = xxh3_64()\n            self._end = 0\n",
        "            self._stream = self._stream or xxh3_64()\n            self._end = 0\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "a fact is taken for a component",
        "pool.py",
        'domain += b"-facts-%d" % len(self.facts)',
        "pass",
        ("tests/unit/core/test_identity_facts.py",),
    ),
    Mutant(
        "a span that is not told needs nothing",
        "offline/prefix.py",
        "needed[bits, :end] = (self.in_source | self.in_target)[bits, :end]",
        "needed[bits, :end] = False",
        ("tests/unit/offline/test_untold.py",),
    ),
]
