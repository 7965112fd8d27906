"""Operations of a simulation, how often each is drawn, and what each may do to the tree."""

from functools import cache

SHARES: dict[str, float] = {
    "begin": 12,
    "insert": 11,
    "end": 11,
    "give_up": 1,
    "trim": 2,
    "squeeze": 0.5,
    "reset": 0.015,
    "backup": 7,
    "load": 6,
    "prefetch": 8,
    "work": 28,
    "poll": 13,
    "cancel": 0.5,
    "finish": 0.5,
    "follow": 4,
    "leave": 1,
    "clear": 0.01,
    "drain": 0.05,
    "detach": 0.03,
    "attach": 1,
    "await": 0.2,
    "arrive": 0.5,
}
"""How often each operation is drawn. ``work`` is one slice of one job: its beginning, a pool's copy, its end."""
HASTE = {"begin": 4, "insert": 4, "end": 4, "backup": 6, "work": 4, "poll": 4}
"""How many times as often, while a tier is not full: as after a start."""
DILIGENCE = {"work": 2, "poll": 3}
"""How many times as often where a write policy starts backups, so that other transfers have their turns, too."""
FULL = 0.95
KINDS = tuple(SHARES)


@cache
def weights_of(*, is_filling: bool, is_writing: bool) -> tuple[float, ...]:
    """Return how often each of ``KINDS`` is drawn."""
    haste, diligence = HASTE if is_filling else {}, DILIGENCE if is_writing else {}
    return tuple(share * haste.get(kind, 1) * diligence.get(kind, 1) for kind, share in SHARES.items())


TRANSFERS = frozenset(
    {"backup", "load", "prefetch", "work", "poll", "cancel", "finish", "follow", "leave", "clear", "detach", "attach"}
    | {"await", "arrive"}
)
EVICTING = frozenset({"begin", "squeeze", "backup", "load", "prefetch", "poll", "reset", "detach"})
"""What may make a page go: whatever allocates."""
WRITING = frozenset({"insert"})
"""And this, where a write policy starts backups."""
FILLING = frozenset({"insert", "poll", "detach"})
"""What may put a page into the tree."""
