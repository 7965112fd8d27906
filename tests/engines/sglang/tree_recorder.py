"""Recorder of the calls that reach SGLang's own tree, and of what it answers, as ``tests.support.sglang_tree`` reads.

SGLANG_WHEEL=DIRECTORY python -m tests.engines.sglang.tree_recorder --core rust --page 64 --seed 7 --steps 150 > 64.txt
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tests.engines.sglang import tree_bootstrap
from tests.support.sglang_tree import prompt_text, slots_text

__all__ = ["TreeCallRecorder", "main"]


class TreeCallRecorder:
    """Takes the place of the methods of one tree, passes every call on and writes it down."""

    def __init__(self, tree: Any, *, bigrams: bool) -> None:
        self.tree = tree
        self.page_size = tree.page_size
        self.lines = [f"page {self.page_size} bigrams" if bigrams else f"page {self.page_size}"]
        self._ahead = int(bigrams)
        self._prefixes: dict[int, str] = {tree.root_node_handle(): "-"}
        self._locks: dict[int, list[int]] = {}
        """Numbers of the locks that are out, by node: which of a node's is given back makes no difference."""
        self._freed: list[list[int]] | None = None
        self._calls = {
            name: getattr(tree, name)
            for name in (
                "match_prefix",
                "touch_prefix",
                "insert",
                "inc_lock_ref",
                "dec_lock_ref",
                "evict_for_alloc",
                "reset",
            )
        }
        for name in self._calls:
            setattr(tree, name, getattr(self, name))
        allocator = tree.token_to_kv_pool_allocator
        self._free_segment = allocator.free_segment
        allocator.free_segment = self.free_segment

    def pages(self, tokens: Any) -> list[int]:
        """Return the slots of pages that token slots lie in, each of which must be whole and in order."""
        assert len(tokens) % self.page_size == 0, "a part of a page"
        pages: list[int] = (tokens[:: self.page_size] // self.page_size).tolist()
        assert tokens.tolist() == [page * self.page_size + at for page in pages for at in range(self.page_size)]
        return pages

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        """Note what a call on the tree frees."""
        if self._freed is not None and len(free_index):
            self._freed.append(self.pages(free_index))
        self._free_segment(free_index, start_pos=start_pos)

    def text(self, key: Any, tokens_count: int | None = None) -> str:
        """Write the whole pages of a key, or its first ``tokens_count`` tokens, and one more of bigrams."""
        whole = (len(key.raw_token_ids()) - self._ahead) // self.page_size * self.page_size
        count = max(whole if tokens_count is None else tokens_count, 0)
        return prompt_text(key.raw_token_ids()[: count + self._ahead if count else 0], key.extra_key, key.cache_salt)

    def note(self, asked: str, answer: str = "") -> None:
        """Write a call down with the sizes after it."""
        sizes = f"{self.tree.evictable_size() // self.page_size} {self.tree.protected_size() // self.page_size}"
        self.lines.append(f"{asked} -> {answer} | {sizes}" if answer else f"{asked} | {sizes}")

    def match_prefix(self, params: Any) -> Any:
        result = self._calls["match_prefix"](params)
        self._prefixes[result.last_device_node] = self.text(params.key, result.device_prefix_len)
        held = self.pages(self.tree.path_device_indices(result.last_device_node))
        self.note(f"match {self.text(params.key)}", f"{result.device_prefix_len // self.page_size} {slots_text(held)}")
        return result

    def touch_prefix(self, key: Any) -> None:
        self._calls["touch_prefix"](key)
        self.note(f"touch {self.text(key)}")

    def insert(self, params: Any) -> Any:
        start = params.prev_prefix_len // self.page_size
        given = slots_text(self.pages(params.value)[start:])
        text = self.text(params.key)
        self._freed = []
        result = self._calls["insert"](params)
        freed, self._freed = sorted(page for pages in self._freed for page in pages), None
        held = slots_text(self.pages(self.tree.path_device_indices(result.last_device_node)))
        self._prefixes[result.last_device_node] = text
        answer = f"{result.prefix_len // self.page_size} {held} {slots_text(freed)}"
        self.note(f"insert {text} {start} {given}", answer)
        return result

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        result = self._calls["inc_lock_ref"](node_id, skip_lock_components)
        number = len(self.lines)
        self._locks.setdefault(node_id, []).append(number)
        self.note(f"lock {number} {self._prefixes[node_id]}")
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        result = self._calls["dec_lock_ref"](node_id, params, skip_swa)
        self.note(f"unlock {self._locks[node_id].pop()}")
        return result

    def evict_for_alloc(self, params: Any, **options: Any) -> Any:
        self._freed = []
        result = self._calls["evict_for_alloc"](params, **options)
        freed, self._freed = self._freed, None
        self.note(f"evict {-(-params.num_tokens // self.page_size)}", " ".join(map(slots_text, freed)) or "-")
        return result

    def reset(self) -> None:
        self._calls["reset"]()
        self._locks.clear()
        self._prefixes = {self.tree.root_node_handle(): "-"}
        self.note("reset")


def main() -> None:
    """Record one random workload to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", default="rust", choices=["python", "rust"])
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--capacity-pages", type=int, default=48)
    parser.add_argument("--turn-pages", type=int, default=6)
    parser.add_argument("--bigrams", action="store_true")
    options = parser.parse_args()
    tree_bootstrap.install()
    scheduler = importlib.import_module("tests.engines.sglang.tree_scheduler")
    workload = scheduler.TreeWorkload(
        options.seed,
        options.page,
        capacity_pages=options.capacity_pages,
        steps=options.steps,
        turn_pages_max=options.turn_pages,
        chunk_pages=max(4, options.turn_pages),
        output_tokens_max=100,
        new_token_ratio=0.05,
        bigrams=options.bigrams,
    )
    tree = scheduler.tree_named(options.core, workload)
    recorder = TreeCallRecorder(tree, bigrams=options.bigrams)
    for _ in scheduler.ModelFreeScheduler(tree, workload).run():
        pass
    sys.stdout.write("\n".join(recorder.lines) + "\n")


if __name__ == "__main__":
    main()
