"""Answers of the store to look-ups, kept while a request that asked lives.

vLLM looks up key by key on its scheduler's thread, the same keys again at every step until none says later. So a
look-up never waits. What the store knows from memory is answered on the spot, which saves the request a step; the other
keys are gathered during a step, sent at its end, and asked for on threads of ``EngineStore``.

    scheduler:  answer ─ known? HIT
                       └ gathers ─> send ─> waiting ─┐
    thread:                                          └─> ask the store ─> answered
    scheduler:  answer <─ applies ───────────────────────────────────────────┘

An answer stays as long as a request that asked for it lives: a chunk that was found is loaded, and one whose load
failed is missing for all these requests, or the engine would try it for ever.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from unified_cache.storage_backends.protocol import NAMES_MAX, Answer

KNOWN_KEYS_MAX = 128
"""Keys that memory is asked for in one step, on the scheduler's thread; their loads begin a step before the others'."""

WAITING_KEYS_MAX = 1 << 20
"""Keys sent and not answered; more are misses at once."""


AskStore = Callable[[Sequence[bytes], Callable[[Sequence[Answer]], None]], None]
"""Begins to ask the store for keys, and hands their answers on, in their order, from another thread."""

IsKnown = Callable[[bytes], bool]
"""Returns, without waiting, whether the store knows from memory that it has a key; False says nothing."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A key that at least one living request asked for. The scheduler's thread alone changes it."""

    key: bytes
    answer: Answer = Answer.UNAVAILABLE
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Look-ups of one tier: HIT, MISS, or UNAVAILABLE until the store has answered.

    All methods belong to the scheduler's thread.
    """

    def __init__(self, is_known: IsKnown) -> None:
        """Start look-ups that are answered at once where ``is_known``."""
        self._is_known = is_known
        self._known_left = KNOWN_KEYS_MAX
        """Keys that memory may still be asked for in this step."""
        self._unknown_request = ""
        """The last request with a key that memory did not know: what follows it is asked for with it."""
        self._asked: dict[bytes, _Asked] = {}
        self._keys: dict[str, set[bytes]] = {}
        """Keys by request."""
        self._gathered: list[_Asked] = []
        self._answered: SimpleQueue[tuple[list[_Asked], Sequence[Answer]]] = SimpleQueue()
        """By the threads that asked, for the scheduler's."""
        self._waiting_count = 0
        """Keys sent whose answers have not been applied."""
        self.answered: Counter[Answer] = Counter()
        """Keys that the store was asked for, by its answer; UNAVAILABLE where too many waited for it to be asked."""

    def answer(self, key: bytes, request: str) -> Answer:
        """Return what is known of a key, and record that ``request`` asked.

        A new key that memory does not know is sent at the end of the step.
        """
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(key)
            if self._knows(key, request):
                asked.answer = Answer.HIT
                self.answered[Answer.HIT] += 1
            elif self._waiting_count + len(self._gathered) >= WAITING_KEYS_MAX:
                asked.answer = Answer.MISS
                self.answered[Answer.UNAVAILABLE] += 1
            else:
                self._gathered.append(asked)
        elif asked.answer is Answer.UNAVAILABLE:
            self._apply()
        if request not in asked.requests:
            asked.requests.add(request)
            self._keys.setdefault(request, set()).add(key)
        return asked.answer

    def send(self, ask: AskStore) -> None:
        """Ask for the keys gathered in this step."""
        self._apply()
        self._known_left = KNOWN_KEYS_MAX
        self._unknown_request = ""
        gathered, self._gathered = [asked for asked in self._gathered if asked.requests], []
        for start in range(0, len(gathered), NAMES_MAX):  # so that those of the first requests do not wait for the last
            piece = gathered[start : start + NAMES_MAX]
            self._waiting_count += len(piece)
            ask([asked.key for asked in piece], partial(self._keep, piece))

    def miss(self, keys: Collection[bytes]) -> None:
        """Answer MISS for keys whose load failed, for as long as any request lives that asked for them."""
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None:
                asked.answer = Answer.MISS

    def request_ended(self, request: str) -> None:
        """Drop what nobody else asked for."""
        for key in self._keys.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]

    def ask_again(self) -> None:
        """Drop all answers, those under way too: living requests ask again."""
        self._asked.clear()
        self._keys.clear()
        self._gathered.clear()

    @property
    def waiting_count(self) -> int:
        """Keys sent that are not answered."""
        self._apply()
        return self._waiting_count

    def _knows(self, key: bytes, request: str) -> bool:
        """Ask memory for a key; as a rule a request whose key it does not know has no later one that it knows."""
        if not self._known_left or request == self._unknown_request:
            return False
        self._known_left -= 1
        is_known = self._is_known(key)
        if not is_known:
            self._unknown_request = request
        return is_known

    def _keep(self, piece: list[_Asked], answers: Sequence[Answer]) -> None:
        self._answered.put((piece, answers))

    def _apply(self) -> None:
        while not self._answered.empty():
            piece, answers = self._answered.get()
            self._waiting_count -= len(piece)
            for asked, answer in zip(piece, answers, strict=True):
                # Of a store that does not answer a request must not wait for ever.
                found = Answer.HIT if answer else Answer.MISS
                self.answered[found] += 1
                # A load that failed meanwhile has the last word.
                if asked.answer is Answer.UNAVAILABLE:
                    asked.answer = found
