"""Single flight of prefetches: no two of them read one page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unified_cache.controller.operation import Operation, OperationState
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import PageNumbers

__all__ = ["FetchedPages"]


class FetchedPages:
    """Pages on their way from storage: which operation fetches each."""

    __slots__ = ("_by_component",)

    def __init__(self, components_count: int) -> None:
        self._by_component: list[dict[PageKey, Operation]] = [{} for _ in range(components_count)]

    def find(self, prompt: Prompt, wanted: Sequence[PageNumbers]) -> Operation | None:
        """Return an operation that fetches any of a prompt's pages, ``wanted[c]`` of component ``c``; None if none.

        One that has failed or was cancelled brings nothing any more, though it may still hold its slots.
        """
        keys = prompt.keys
        for fetched, pages in zip(self._by_component, wanted, strict=True):
            for page in pages.tolist() if fetched else ():
                operation = fetched.get(keys[page])
                if operation is not None and operation.state is OperationState.RUNNING:
                    return operation
        return None

    @contextmanager
    def marked(self, prompt: Prompt, wanted: Sequence[PageNumbers], operation: Operation) -> Iterator[None]:
        """Mark pages as fetched by an operation, for the length of a ``with`` block."""
        keys = prompt.keys
        marked = [[keys[page] for page in pages.tolist()] for pages in wanted]
        for fetched, ours in zip(self._by_component, marked, strict=True):
            fetched.update(dict.fromkeys(ours, operation))
        try:
            yield
        finally:
            for fetched, ours in zip(self._by_component, marked, strict=True):
                for key in ours:
                    if fetched.get(key) is operation:  # where it has failed, another may have taken over
                        del fetched[key]
