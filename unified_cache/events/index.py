"""Index of what engines have told: how many pages of a prompt each of them could resume, and from which tier.

It is made of KV events alone, whatever engine sent them: a page is named by its tokens and all before them, as our own
engines name pages (``page.Prompt``); an engine that names its pages otherwise is followed from parent to child. An
answer never counts a page that the engine has not told, or that it could not resume from:

    pages          F F F F F F . .        Full, told for the device
    window of 2    . . . w w w . .        a window of two pages, told for the device
    restorable     . . . . ^ ^            after 5 and after 6 pages; 6 is the answer

It is bounded: of an engine that tells more pages than ``pages_max`` it forgets those told first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock

import numpy as np

from unified_cache.arguments import check_kind, check_text
from unified_cache.errors import ConfigError, InputError
from unified_cache.events.values import BlockHash, ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.page import DEFAULT_NAMESPACE, PAGE_KEY_BYTES, Namespace, PageKey, Prompt, TokensLike, key_chain
from unified_cache.pool import Pages
from unified_cache.window import SPAN_ALL, restorable_ends

__all__ = ["EngineScore", "EngineTraits", "HashKind", "Knowledge", "PrefixIndex"]

ENGINES_MAX = 4_096
"""Engines of one index."""


class HashKind(Enum):
    """Names that an engine gives its pages."""

    PAGE_KEYS = "page_keys"
    """The keys of ``page.Prompt``: an engine with this cache that sends vLLM's form."""
    OWN = "own"
    """Any others; their pages are followed by tokens and parents."""


class Knowledge(Enum):
    """Part of what an engine holds that is known."""

    WHOLE = "whole"
    """Every event since the engine held nothing."""
    PART = "part"
    """Events since a gap: what was told is true, what the engine holds from before it is missing."""
    NONE = "none"
    """Nothing was heard yet, or events are missing and are being asked for: nothing is counted."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an engine that its events do not tell."""

    hashes: HashKind = HashKind.OWN
    storage: str | None = None
    """Name of the storage that it shares with other engines of the same name; None for one of its own."""
    spans: tuple[int, ...] = ()
    """Pages before an end that a resume needs, by component; empty to learn them from events. Then a model of several
    components counts as one of Full alone until the first event of another."""


@dataclass(frozen=True, slots=True)
class EngineScore:
    """Pages of a prompt that one engine could resume."""

    engine: str
    knowledge: Knowledge
    page_size: int
    """Tokens per page; 0 while it is not known."""
    device_pages: int
    """From its device alone."""
    host_pages: int
    """From device and host together."""
    storage_pages: int
    """From device, host and storage together."""


Lane = tuple[Medium, str, int]
"""Tier, which of several stores, component."""


@dataclass(slots=True)
class EnginePages:
    """Pages that one engine has told."""

    settings: EngineTraits
    knowledge: Knowledge = Knowledge.NONE
    page_size: int = 0
    spans: dict[int, int] = field(default_factory=dict)
    """By component, as far as they were told."""
    lanes: dict[Lane, dict[PageKey, None]] = field(default_factory=dict)
    """Pages of each lane, those told first first."""
    pages_count: int = 0
    keys: dict[BlockHash, tuple[PageKey, int]] = field(default_factory=dict)
    """Key of each page by the engine's own name, and the number of lanes that have it."""
    names: dict[PageKey, BlockHash] = field(default_factory=dict)
    """The engine's own name of each page."""


class PrefixIndex:
    """Pages that engines have told, by engine, tier and component. Thread-safe."""

    def __init__(self, pages_max: int = 1 << 20) -> None:
        """Keep at most ``pages_max`` pages for each engine, counted once for each tier and component.

        Raises:
            ConfigError: no room for a page.
        """
        if pages_max < 1:
            raise ConfigError(f"pages_max must be positive, found {pages_max}")
        self._pages_max = pages_max
        self._engines: dict[str, EnginePages] = {}
        self._guard = Lock()
        self.unplaced_count = 0
        """Pages told whose place is not known, because the page before them is not: they are not counted."""
        self.forgotten_count = 0
        """Pages forgotten because an engine has told more than there is room for."""

    def add_engine(self, name: str, settings: EngineTraits = EngineTraits()) -> None:
        """Take an engine in, of which nothing is known yet; one of that name that is there is forgotten.

        Raises:
            InputError: no name.
            ConfigError: more engines than ``ENGINES_MAX``, or spans that none can have.
        """
        check_text("name of an engine", name)
        check_kind(settings, EngineTraits, "an EngineTraits")
        if not name:
            raise InputError("an engine needs a name, found none")
        if not all(1 <= span <= SPAN_ALL for span in settings.spans):
            raise ConfigError(f"a span is in [1, {SPAN_ALL}], found {settings.spans}")
        with self._guard:
            if name not in self._engines and len(self._engines) >= ENGINES_MAX:
                raise ConfigError(f"an index has at most {ENGINES_MAX} engines")
            self._engines[name] = EnginePages(settings)

    def remove_engine(self, name: str) -> bool:
        """Forget an engine; tell whether it was there. What it told of a storage that others share goes with it."""
        with self._guard:
            return self._engines.pop(name, None) is not None

    def engines(self) -> dict[str, Knowledge]:
        """Return the engines by name."""
        with self._guard:
            return {name: engine.knowledge for name, engine in self._engines.items()}

    def pages_count(self, name: str) -> int:
        """Return the pages known of an engine, once for each tier and component; 0 for one that is not there."""
        with self._guard:
            engine = self._engines.get(name)
            return 0 if engine is None else engine.pages_count

    def apply(self, name: str, events: Iterable[KvEvent]) -> None:
        """Note what an engine tells, in order; nothing for one that is not there.

        Of an engine known in part, ``AllBlocksCleared`` makes all known.
        """
        with self._guard:
            engine = self._engines.get(name)
            if engine is None:
                return
            for event in events:
                match event:
                    case ClearedEvent():
                        _forget(engine)
                        if engine.knowledge is Knowledge.PART:
                            engine.knowledge = Knowledge.WHOLE
                    case RemovedEvent():
                        self._remove(engine, event)
                    case StoredEvent():
                        self._store(engine, event)

    def set_knowledge(self, name: str, knowledge: Knowledge) -> None:
        """Say how much is known of an engine; with ``Knowledge.NONE`` nothing of it is counted until this says more."""
        with self._guard:
            engine = self._engines.get(name)
            if engine is not None:
                engine.knowledge = knowledge

    def forget(self, name: str) -> None:
        """Forget the pages of an engine, as far as they were told."""
        with self._guard:
            engine = self._engines.get(name)
            if engine is not None:
                _forget(engine)

    # ---- asking ---------------------------------------------------------------------------------------------------

    def score(self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE) -> list[EngineScore]:
        """Return for every engine, by name, how many pages of a prompt it could resume.

        Raises:
            TokenError: as ``Prompt.of``.
        """
        with self._guard:
            sizes = {engine.page_size for engine in self._engines.values() if engine.page_size}
        # Keys are computed here, where nobody waits for the index.
        keys_by_size = {size: Prompt.of(tokens, size, namespace).keys for size in sizes}
        if not sizes:
            Prompt.of(tokens, 1, namespace)  # for what it checks
        scores: list[EngineScore] = []
        with self._guard:
            for name in sorted(self._engines):
                engine = self._engines[name]
                keys = keys_by_size.get(engine.page_size)
                ends = (0, 0, 0)
                if keys is not None and engine.knowledge is not Knowledge.NONE:
                    ends = self._ends(engine, keys)
                scores.append(EngineScore(name, engine.knowledge, engine.page_size, *ends))
        return scores

    def _ends(self, engine: EnginePages, keys: Sequence[PageKey]) -> tuple[int, int, int]:
        """Return the longest prefix that can be resumed from the device, with the host, and with storage.

        Pages of a component that has another page size than the engine's first one are not known: such an engine
        scores nothing.
        """
        spans = engine.settings.spans or tuple(
            engine.spans.get(number, SPAN_ALL) for number in range(max(engine.spans, default=0) + 1)
        )
        present = [np.zeros(len(keys), np.bool_) for _ in spans]
        found: list[int] = []
        for medium in Medium:
            for number, mask in enumerate(present):
                for pages in self._pages(engine, medium, number):
                    _mark(mask, keys, pages)
            reach = min(
                (
                    int(np.argmin(mask))
                    for mask, span in zip(present, spans, strict=True)
                    if span == SPAN_ALL and not mask.all()
                ),
                default=len(keys),
            )
            holes = [None if mask[:reach].all() else ~mask[:reach] for mask in present]
            ends = np.flatnonzero(restorable_ends(spans, holes, 0, reach, [0 for _ in spans]))
            found.append(int(ends[-1]) + 1 if ends.size else 0)
        return found[0], found[1], found[2]

    def _pages(self, engine: EnginePages, medium: Medium, component: int) -> Iterator[dict[PageKey, None]]:
        """Yield the pages of an engine's component on a tier; of shared storage what any engine has told."""
        tellers = [engine]
        if medium is Medium.STORAGE and engine.settings.storage is not None:
            tellers = [
                other
                for other in self._engines.values()
                if other.settings.storage == engine.settings.storage and other.knowledge is not Knowledge.NONE
            ]
        for teller in tellers:
            for lane, pages in teller.lanes.items():
                if lane[0] is medium and lane[2] == component:
                    yield pages

    # ---- noting ---------------------------------------------------------------------------------------------------

    def _store(self, engine: EnginePages, event: StoredEvent) -> None:
        engine.page_size = engine.page_size or max(event.page_size, 0)
        if event.spans:
            engine.spans = dict(enumerate(event.spans))
        else:
            engine.spans.setdefault(event.group, event.span)
        keys = self._keys(engine, event)
        self.unplaced_count += len(event.hashes) - len(keys)
        lane = engine.lanes.setdefault((event.medium, event.owner, event.group), {})
        for name, key in zip(event.hashes, keys, strict=False):
            if key in lane:
                continue
            lane[key] = None
            engine.pages_count += 1
            if engine.settings.hashes is HashKind.OWN:
                engine.keys[name] = (key, engine.keys.get(name, (key, 0))[1] + 1)
                engine.names[key] = name
        while engine.pages_count > self._pages_max:
            self._forget_oldest(engine)

    def _remove(self, engine: EnginePages, event: RemovedEvent) -> None:
        if engine.settings.hashes is HashKind.PAGE_KEYS:
            keys = [name for name in event.hashes if isinstance(name, bytes)]
        else:
            keys = [engine.keys[name][0] for name in event.hashes if name in engine.keys]
        lane = (event.medium, event.owner, event.group)
        for key in keys:
            _drop(engine, lane, key)
        storage = engine.settings.storage
        if event.medium is Medium.STORAGE and storage is not None:
            for other in self._engines.values():
                if other is not engine and other.settings.storage == storage:
                    for key in keys:
                        _drop(other, lane, key)

    def _keys(self, engine: EnginePages, event: StoredEvent) -> Sequence[PageKey]:
        """Return the keys of an event's pages, of the first ones only where the place of the rest is not known."""
        if engine.settings.hashes is HashKind.PAGE_KEYS:
            return [name for name in event.hashes if isinstance(name, bytes) and len(name) == PAGE_KEY_BYTES]
        known = [engine.keys[name][0] for name in event.hashes if name in engine.keys]
        if len(known) == len(event.hashes):
            return known
        if event.page_size < 1 or event.page_size != engine.page_size:
            return []
        per_page = len(event.tokens) // len(event.hashes) if event.hashes else 0
        if per_page not in (event.page_size, 2 * event.page_size) or len(event.tokens) % len(event.hashes):
            return []
        seed = self._seed(engine, event)
        placed = _placed_pages(event)
        if seed is None or not placed:
            return []
        tokens = np.array(event.tokens[: placed * per_page], "<i4").tobytes()
        return key_chain(seed, tokens, per_page)

    def _seed(self, engine: EnginePages, event: StoredEvent) -> bytes | None:
        """Return what stands before an event's first page in the chain of keys; None if that is not known."""
        if event.parent is not None:
            known = engine.keys.get(event.parent)
            return None if known is None else known[0]
        extra = list(event.extra_keys[0] or ()) if event.extra_keys else []
        if event.lora_name is not None and extra[:1] == [event.lora_name]:
            del extra[0]
        if len(extra) > 1:
            return None
        return Namespace(lora_id=event.lora_name, cache_salt=extra[0] if extra else None).seed

    def _forget_oldest(self, engine: EnginePages) -> None:
        """Forget the page told first in the largest lane."""
        lane = max(engine.lanes, key=lambda each: len(engine.lanes[each]))
        _drop(engine, lane, next(iter(engine.lanes[lane])))
        self.forgotten_count += 1


def _mark(mask: Pages, keys: Sequence[PageKey], pages: dict[PageKey, None]) -> None:
    """Set the mask of the keys that are among the pages."""
    if pages:
        mask |= np.fromiter((key in pages for key in keys), np.bool_, len(keys))


def _placed_pages(event: StoredEvent) -> int:
    """Count the first pages of an event that depend on nothing but tokens, adapter and the beginning."""
    adapter = () if event.lora_name is None else (event.lora_name,)
    for page, extra in enumerate(event.extra_keys):
        if extra and tuple(extra) != adapter and not (page == 0 and event.parent is None):
            return page
    return len(event.hashes)


def _drop(engine: EnginePages, lane: Lane, key: PageKey) -> None:
    """Forget a page of a lane, and its name once no lane has it."""
    pages = engine.lanes.get(lane)
    if pages is None or key not in pages:
        return
    del pages[key]
    engine.pages_count -= 1
    name = engine.names.get(key)
    if name is None:
        return
    lanes_count = engine.keys[name][1] - 1
    if lanes_count:
        engine.keys[name] = (key, lanes_count)
    else:
        del engine.keys[name]
        del engine.names[key]


def _forget(engine: EnginePages) -> None:
    """Forget all that an engine has told, but what model it runs."""
    engine.lanes.clear()
    engine.keys.clear()
    engine.names.clear()
    engine.pages_count = 0
