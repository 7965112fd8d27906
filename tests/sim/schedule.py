"""Operations of a simulation, how often each is drawn, and what each may do to the tree."""

SHARES: dict[str, float] = {
    "begin": 12,
    "insert": 11,
    "end": 11,
    "give_up": 1,
    "trim": 2,
    "squeeze": 0.5,
    "reset": 0.01,
    "backup": 7,
    "load": 6,
    "prefetch": 6,
    "work": 28,
    "poll": 13,
    "cancel": 0.5,
    "follow": 4,
    "leave": 1,
    "clear": 0.01,
}
"""How often each operation is drawn. ``work`` is one slice of one job: its beginning, a pool's copy, its end."""
HASTE = {"begin": 4, "insert": 4, "end": 4, "backup": 6, "work": 4, "poll": 4}
FULL = 0.95
KINDS = tuple(SHARES)
WEIGHTS = tuple(SHARES.values())
FILLING_WEIGHTS = tuple(share * HASTE.get(kind, 1) for kind, share in SHARES.items())
"""While a tier is not full: as after a start."""
TRANSFERS = frozenset({"backup", "load", "prefetch", "work", "poll", "cancel", "follow", "leave", "clear"})
EVICTING = frozenset({"begin", "squeeze", "backup", "load", "prefetch", "poll", "reset"})
"""What may make a page go: whatever allocates."""
FILLING = frozenset({"insert", "poll"})
"""What may put a page into the tree."""
