"""Mistakes in KV events and in what watches the tiers for them."""

from scripts.mutants.mutant import Mutant

EVENT_TESTS = (
    "tests/unit/events/test_page_changes.py",
    "tests/unit/events/test_encoding.py",
)
"""What must catch a mutant of KV events."""

PUBLISHER_TESTS = ("tests/unit/events/test_publisher.py",)
"""What must catch a mutant of how events are sent and sent again."""

EVENTS_MUTANTS = [
    Mutant(
        "the tree forgets whose pages hang below a root",
        "tree/radix.py",
        "            root.namespace = prompt.namespace\n",
        "            pass\n",
        EVENT_TESTS,
    ),
    Mutant(
        "pages of a namespace that is not known are told of as the bare model's",
        "observe/events/slot_keys.py",
        "        namespace = prompt.namespace\n        if namespace is None or not len(pages):\n",
        "        namespace = prompt.namespace or Namespace()\n        if not len(pages):\n",
        EVENT_TESTS,
    ),
    Mutant(
        "duplicates of an insert are told as held",
        "controller/page_changes.py",
        "taken &= ~np.isin(given, left)",
        "taken &= taken",
        EVENT_TESTS,
    ),
    Mutant(
        "a page evicted while it was put is told as stored",
        "controller/page_changes.py",
        "if any(self._evicted.get(name, -1) >= since for name in names):",
        "if any(self._evicted.get(name, -1) > since + 1 for name in names):",
        EVENT_TESTS,
    ),
    Mutant(
        "an announcement tells of storage what was evicted there",
        "observe/events/slot_keys.py",
        "not self._changes.was_evicted(component, prompt.keys[page])",
        "True",
        EVENT_TESTS,
    ),
    Mutant(
        "a run in the middle of the tree begins a prompt",
        "observe/events/slot_keys.py",
        "begins = is_at_root and not start",
        "begins = not start",
        EVENT_TESTS,
    ),
    Mutant(
        "a page of bigrams is told by one token of each pair",
        "observe/events/encoding.py",
        "    if not _is_of_bigrams(event):\n        return event.tokens\n",
        "    if not _is_of_bigrams(event) or event.tokens:\n        return event.tokens\n",
        EVENT_TESTS,
    ),
    Mutant(
        "an event names pages without a bound",
        "observe/events/slot_keys.py",
        "cuts = {*range(0, len(pages), EVENT_PAGES_MAX), *breaks.tolist(), len(pages)}",
        "cuts = {0, *breaks.tolist(), len(pages)}",
        EVENT_TESTS,
    ),
    Mutant(
        "a clear of storage takes memory along for good",
        "observe/events/slot_keys.py",
        "self.needs_announcement = any(map(any, self._in_slots))",
        "self.needs_announcement = False",
        PUBLISHER_TESTS,
    ),
    Mutant(
        "a replay begins after the batch that was asked for",
        "observe/events/publisher.py",
        "start = min(max(seq - self.first_seq, 0), len(self._batches))",
        "start = min(max(seq - self.first_seq + 1, 0), len(self._batches))",
        PUBLISHER_TESTS,
    ),
    Mutant(
        "what is kept for replay has no bound in bytes",
        "observe/events/publisher.py",
        "while len(self._batches) > self._batches_max or self._bytes_count > self._bytes_max:",
        "while len(self._batches) > self._batches_max:",
        PUBLISHER_TESTS,
    ),
    Mutant(
        "an announcement that was asked for is forgotten",
        "observe/events/publisher.py",
        "                self._is_announcement_asked = True\n            else:\n",
        "                pass\n            else:\n",
        PUBLISHER_TESTS,
    ),
    Mutant(
        "a publisher goes on handing over to a thread that is stuck",
        "observe/events/publisher.py",
        "        if self.waiting_pages >= self._config.queued_pages_max:\n            return\n",
        "",
        PUBLISHER_TESTS,
    ),
    Mutant(
        "pages that leave host memory leave the device",
        "observe/events/slot_keys.py",
        "yield from _removals(Medium(left.tier), left.component, keys)",
        "yield from _removals(Medium.DEVICE, left.component, keys)",
        EVENT_TESTS,
    ),
    Mutant(
        "a removal names pages without a bound",
        "observe/events/slot_keys.py",
        "    for start in range(0, len(keys), EVENT_PAGES_MAX):\n",
        "    EVENT_PAGES_MAX = len(keys) or 1\n    for start in range(0, len(keys), EVENT_PAGES_MAX):\n",
        EVENT_TESTS,
    ),
    Mutant(
        "objects of others are told as evicted",
        "observe/events/slot_keys.py",
        "if (label.pool, label.identity) in self._owners:",
        "if label.pool in self._components_by_pool:",
        EVENT_TESTS,
    ),
    Mutant(
        "a slot that was left keeps its page",
        "observe/events/slot_keys.py",
        "(key := in_slots.pop(slot, None)) is not None",
        "(key := in_slots.get(slot)) is not None",
        EVENT_TESTS,
    ),
]
