"""Time that a test moves by hand."""


class ManualClock:
    """Monotonic clock whose seconds pass only when a test adds to ``now_s`` or something sleeps on it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.sleeps_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let the seconds pass, and note them in ``sleeps_s``."""
        self.sleeps_s.append(seconds)
        self.now_s += seconds
