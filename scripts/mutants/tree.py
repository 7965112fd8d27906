"""Mistakes in the tree, its windows, the slots, and the ledger over them."""

from scripts.mutants.mutant import Mutant

LAST_TOKEN_TESTS = ("tests/unit/core/test_last_token.py",)
MEDIA_TESTS = ("tests/unit/core/test_page.py", "tests/unit/core/test_tree.py", "tests/unit/core/test_cache.py")

TREE_MUTANTS = [
    Mutant(
        "media are left out of the page key",
        "core/page.py",
        'page + marks.get(len(keys), b"") if marks else page',
        "page",
        tests=MEDIA_TESTS,
    ),
    Mutant(
        "the tree compares tokens and not what stands behind them",
        "tree/match.py",
        "    return min(differing, default=node.end)\n",
        "    return node.end\n",
        tests=MEDIA_TESTS,
    ),
    Mutant(
        "a page written back loses its media",
        "tree/victim.py",
        "tokens, self.tree.page_size, media, root.namespace)",
        "tokens, self.tree.page_size, namespace=root.namespace)",
        tests=("tests/unit/core/test_backups.py",),
    ),
    Mutant(
        "an unlock walks to the root",
        "tree/radix.py",
        "self._unpin(lock.node, self.tier_component(lock.tier, component), start)",
        "self._unpin(lock.node, self.tier_component(lock.tier, component), 0)",
    ),
    Mutant(
        "a lock leaves out the node it ends in",
        "tree/radix.py",
        '"""Count one more lock on pages from ``start`` to the end of ``node``."""\n',
        '"""Count a lock less than there are."""\n        node = node.parent or node\n',
    ),
    Mutant(
        "a transfer's target is pinned at its end alone",
        "tree/radix.py",
        "full_start = node.start if node.held_count[tier_component] == node.end - node.start else 0",
        "full_start = node.start",
    ),
    Mutant("a split forgets the locks", "tree/node.py", "upper.locks = self.locks.copy()", "upper.locks = upper.locks"),
    Mutant("a split forgets what is arriving", "tree/node.py", "        self._split_arriving(upper, offset)\n", ""),
    Mutant("a lock that begins at a cut is lost", "tree/node.py", "if page <= self.start:", "if page < self.start:"),
    Mutant(
        "a split is an access",
        "tree/radix.py",
        "upper = node.split(offset, self.page_size)\n",
        "upper = node.split(offset, self.page_size)\n        self.queues.touch(upper, UNNAMED)\n",
    ),
    Mutant(
        "a window is not counted again after a tombstone",
        "core/window.py",
        "np.maximum.accumulate(last_tombstone, out=last_tombstone)",
        "np.minimum.accumulate(last_tombstone, out=last_tombstone)",
    ),
    Mutant(
        "a tombstone above the run is forgotten",
        "tree/match.py",
        "node.last_tombstone_before(view, component, upto) or before[component]",
        "node.last_tombstone_before(view, component, upto)",
    ),
    Mutant(
        "a window starts a page late",
        "core/window.py",
        "return end - span if end > span else 0",
        "return end - span + 1 if end > span else 0",
    ),
    Mutant(
        "only the device side of a load is pinned",
        "tree/transfer.py",
        "source_lock = tree.lock(found, end, source)",
        "source_lock = tree.lock(found, end, target)",
    ),
    Mutant(
        "two transfers bring one page",
        "tree/transfer.py",
        "lacking &= ~at.in_flight[on_target]",
        "lacking &= ~at.in_flight[on_target] | True",
    ),
    Mutant(
        "pages are published before their prefix",
        "tree/transfer.py",
        "return found[::-1]",
        "return found",
    ),
    Mutant(
        "pages are lost that came before their prefix",
        "tree/transfer.py",
        "return found[::-1]",
        "return found",
        ("tests/sim/test_simulation.py",),
    ),
    Mutant(
        "a state is published without Full",
        "tree/transfer.py",
        "tombstones &= full[offsets] >= 0 if full is not None else False",
        "tombstones &= True",
    ),
    Mutant(
        "eviction leaves dependants behind",
        "tree/radix.py",
        "            self._drop(node, dependant, start, min(end, node.first_pinned(dependant)), freed)\n",
        "            pass\n",
    ),
    Mutant(
        "eviction takes one page too many each time",
        "tree/radix.py",
        "start = max(0, end - pages)",
        "start = max(0, end - pages - 1)",
    ),
    Mutant(
        "a lock leaves the pages above it evictable",
        "tree/counts.py",
        "protection.children[tier] += 1 if is_protected else -1",
        "pass",
    ),
    Mutant(
        "pages that arrive under a lock count as evictable",
        "tree/counts.py",
        "if not held_count or node.locks[tier_component]:",
        "if not held_count:",
    ),
    Mutant(
        "recency is lost with the child",
        "tree/radix.py",
        "parent.stamps[tier_component] = node.stamps[tier_component]",
        "parent.stamps[tier_component] = parent.stamps[tier_component]",
    ),
    Mutant(
        "a freed page stays in the map",
        "tree/radix.py",
        "full[start:end].copy() if whole else full[start:end][segment >= 0]",
        "full[:0]",
    ),
    Mutant(
        "the map is not rebuilt by a load",
        "controller/ledger.py",
        "        self._apply(published.map_changes)\n",
        "",
    ),
    Mutant(
        "a duplicate keeps its peer",
        "tree/radix.py",
        "MapChange(duplicates[0], None)",
        "MapChange(duplicates[0][:0], None)",
    ),
    Mutant(
        "slots of the tree may be inserted again",
        "core/slots.py",
        "self._check(slots, _OUT)",
        "self._check(slots[:0], _OUT)",
    ),
    Mutant(
        "slots are handed out before there is room for all",
        "controller/ledger.py",
        "if not all(self._make_room(tier, component, count) for component, count in counts):\n"
        "            return None\n"
        "        allocated: list[Slots] = []\n"
        "        for component, count in counts:\n"
        "            slots = self._allocators[tier][component].allocate(count)\n",
        "allocated: list[Slots] = []\n"
        "        for component, count in counts:\n"
        "            slots = self.allocate(tier, component, count)\n",
    ),
    Mutant(
        "pages are evicted for an allocation that is declined",
        "controller/ledger.py",
        "if any(count > self.available_pages(tier, component) for component, count in counts):",
        "if not counts:",
    ),
    Mutant(
        "a fork is the tree's own state",
        "controller/ledger.py",
        "memory.duplicate(pool, sources[number], slots)",
        "memory.duplicate(pool, sources[number], sources[number])",
    ),
    Mutant(
        "a branch is not kept",
        "core/window.py",
        "needed[max(window(resumed, span) - start, 0) : max(resumed - start, 0)] = True",
        "needed[:] = False\n        needed[max(window(resumed, span) - start, 0) : max(resumed - start, 0)] = True",
    ),
    Mutant(
        "a split leaves the last window at the place of what was cut off before it",
        "tree/eviction_queues.py",
        "            if rank == queued_rank and place == queued_place:\n",
        "            if rank == queued_rank:\n",
        tests=("tests/unit/core/test_tree.py",),
    ),
    Mutant(
        "a window takes pages along that other locks pin",
        "tree/radix.py",
        "self._drop(node, dependant, start, min(end, node.first_pinned(dependant)), freed)",
        "self._drop(node, dependant, start, end, freed)",
    ),
    Mutant(
        "letting go of windows lets go of Full",
        "tree/radix.py",
        "self._unpin_all(held, held.held[1:])\n        held.held = held.held[:1]",
        "self._unpin_all(held, held.held)\n        held.held = []",
    ),
    Mutant(
        "matching goes as far as the last token",
        "core/page.py",
        "max(prompt.tokens_count - 1, 0) // page_size",
        "prompt.tokens_count // page_size",
        tests=LAST_TOKEN_TESTS,
    ),
    Mutant(
        "windows are kept at the prompt's own end alone",
        "cache/calls.py",
        "{prompt.reusable_pages, *ends}",
        "{*ends}",
        tests=LAST_TOKEN_TESTS,
    ),
    Mutant(
        "a request that computes its last page again does not use it",
        "tree/match.py",
        "self.tree_end if self.device_end == self.prompt.reusable_pages else self.device_end",
        "self.device_end",
        tests=LAST_TOKEN_TESTS,
    ),
]
