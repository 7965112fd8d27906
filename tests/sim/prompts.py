"""Prompts as conversations make them: continued, branched off, and now and then new."""

import random
from collections import deque
from hashlib import blake2b

from tests.sim.memory import Contents, KeyNumbers
from unified_cache.core.page import MediaItem, Namespace, PageKey, Prompt, media_between

NAMESPACES = (Namespace(), Namespace(tenant="b"))

KNOWN_MAX = 120
"""Prompts that may be continued."""
NEW_SHARE = 0.15
PAGES_MAX = 20
BEGINNINGS = 4
"""Prompts begin with one of so many runs of pages: system prompts."""
PAGE_KINDS = 6
"""Pages differ in one token out of so many, so that two prompts meet by chance, too."""
PICTURE = PAGE_KINDS
"""Kind of a page of placeholders. It hides one of a few pictures, or its tokens are text."""
PICTURES = ("", "cat", "dog")


class Prompts:
    """An endless supply."""

    def __init__(self, rng: random.Random, page_size: int, numbers: KeyNumbers) -> None:
        self._rng = rng
        self._page_size = page_size
        self._numbers = numbers
        self._known: list[tuple[Prompt, Contents]] = []
        self._prefixes: dict[PageKey, bytes] = {}
        """What each key stands for: all that the state of its page depends on."""
        self._backed_up: deque[tuple[Prompt, Contents]] = deque(maxlen=KNOWN_MAX)

    def known(self) -> tuple[Prompt, Contents]:
        """Return a prompt that was asked for before, with the numbers of its pages; new if there is none."""
        return self._rng.choice(self._known) if self._known else self.next()

    def note_backup(self, prompt: Prompt, numbers: Contents) -> None:
        """Remember that a prompt was to be backed up."""
        self._backed_up.append((prompt, numbers))

    def backed_up(self) -> tuple[Prompt, Contents]:
        """Return a prompt that was to be backed up, or any other known one."""
        return self._rng.choice(self._backed_up) if self._backed_up and self._rng.random() < 0.8 else self.known()

    def next(self) -> tuple[Prompt, Contents]:
        """Return a prompt to serve: a known one, mostly continued or cut and continued, or a new one."""
        rng = self._rng
        if self._known and rng.random() > NEW_SHARE:
            old, _ = rng.choice(self._known)
            tokens, seed = old.tokens, old.seed
            if rng.random() < 0.35 or old.pages_count >= PAGES_MAX:
                tokens = tokens[: rng.randrange(1, old.pages_count + 1) * self._page_size * 4]
            media = dict(media_between(old.media, 0, len(tokens) // (self._page_size * 4)))
            tokens += self._pages(rng.randrange(5), len(tokens), media)
        else:
            seed = rng.choice(NAMESPACES).seed
            beginning = rng.randrange(BEGINNINGS)
            tokens = b"".join(self._page(1000 + beginning * 10 + page) for page in range(1 + beginning))
            media = {}
            tokens += self._pages(rng.randrange(2, 12), len(tokens), media)
        prompt = Prompt(tokens, self._page_size, seed, media=media)
        self._check_keys(prompt)
        prompt.reusable_pages -= prompt.keys[-1][0] & 1  # half of them end with their last page
        made = (prompt, self._numbers.of(prompt.keys))
        if len(self._known) < KNOWN_MAX:
            self._known.append(made)
        else:
            self._known[rng.randrange(KNOWN_MAX)] = made
        return made

    def _pages(self, count: int, start_bytes: int, media: dict[int, tuple[MediaItem, ...]]) -> bytes:
        """Return so many pages, and note the pictures behind them."""
        first = start_bytes // (self._page_size * 4)
        kinds = [self._rng.randrange(PAGE_KINDS + 1) for _ in range(count)]
        for page, kind in enumerate(kinds, first):
            if kind == PICTURE and (digest := self._rng.choice(PICTURES)):
                media[page] = (MediaItem(page * self._page_size, self._page_size, digest),)
        return b"".join(map(self._page, kinds))

    def _check_keys(self, prompt: Prompt) -> None:
        """A key names one prefix: no two that differ in their namespace, a token or what stands behind it."""
        prefix = blake2b(prompt.root)
        page_bytes = self._page_size * 4
        for page, key in enumerate(prompt.keys):
            tokens = prompt.tokens[page * page_bytes : (page + 1) * page_bytes]
            prefix.update(tokens + repr(prompt.media.get(page)).encode())
            assert self._prefixes.setdefault(key, prefix.digest()) == prefix.digest(), "a key names two prefixes"

    def _page(self, kind: int) -> bytes:
        return kind.to_bytes(4, "little") * self._page_size
