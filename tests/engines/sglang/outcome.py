"""Descriptions of runs of the engine, and of what came of them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineJob:
    """Description of one run."""

    stack: str = "full"
    core: str = "rust"
    stores: list[dict[str, Any]] = field(default_factory=list)
    """Extra configuration of each store; one with ``file_storage_path`` is SGLang's own file backend."""
    phases: str = "write read"
    prompts: int = 2
    pages: int = 8
    grows: bool = False
    layers: int = 4
    heads: int = 8
    window_pages: int = 4
    layout: str = "page_first"
    io_backend: str = "kernel"
    rounds: int = 1
    attach: bool = False
    """Whether the store is attached after the engine has started."""
    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1
    """Of a pipeline; each stage has other layers, and so other bytes under the same names."""
    draft_layers: int = 0
    """Of a draft model whose pool of heads shares the places of the model's; 0 for none."""
    meeting: str = ""
    """File by which the ranks find each other."""
    record: str = ""
    """File to keep the engine's calls on its storage in."""
    linked: str = ""
    """What the engine does over a linker in the place of HiCache, see ``linked_session``; nothing if it is empty."""
    requests: int = 500
    """That a linker answers whose store misbehaves, or histories that its look-ups are compared in."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return 256 if self.stack == "dsv4" else 64


@dataclass
class JobOutcome:
    """Result of a run over one store."""

    store: str
    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    restored_pages: list[int] = field(default_factory=list)
    expected_pages: list[int] = field(default_factory=list)
    rows_checked: int = 0
    rows_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    prompt_bytes: int = 0
    """Of one prompt, in all pools."""
    pools: dict[str, int] = field(default_factory=dict)
    """Bytes of a page by pool."""
    start_s: float = 0.0
    """Time until the engine had started."""
    recomputed: bool = True
    """Whether every prompt that did not come back as a whole could be computed again from where it ended."""
    store_calls: int = 0
    """Calls that reached a store which misbehaves on purpose."""
    threads_left: list[str] = field(default_factory=list)
    """Threads of ours that still run after the store was detached, and calls that hung were let go."""
    views_left: int = 0
    """Views of memory beyond those that there were before the engine started."""
    detached: bool = False
    collected: bool = False
    """Whether nothing holds the adapter after it was detached."""
    close_s: float = 0.0
    failed: int = 0
    """Requests that the engine ended with an error."""
    late_lookups: int = 0
    """Look-ups of a linker that took as long as if they had waited for a store that hangs."""
    warnings: list[str] = field(default_factory=list)
    """Lines of ours in the log, of warnings and errors."""
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every prompt came back, byte by byte."""
        return not (self.error or self.rows_wrong) and self.restored_pages == self.expected_pages
