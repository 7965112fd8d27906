"""Growth of costs with pages, from ten thousand to ten million: a table, and the picture in docs.

    python -m benchmarks.growth [KIND ...] [PAGES ...]

Each kind and number of pages is measured in processes of its own: ``packed`` and ``file`` under a cap that they fill,
a ``service`` over a packed store, and the ``tree``. A call names ``BATCH`` pages, drawn from the newer half; memory is
what the process has more than before it opened the store. Stores are made in TMPDIR. Rows stay in
``benchmarks/results``, and the table and the picture show all that are there. The tree is asked for whole prompts:
``exists`` is a match, ``get`` a match that is locked and unlocked, ``put`` an insert after as many pages were evicted.
"""

import gc
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple, TypeVar

import numpy as np
from matplotlib.figure import Figure

from benchmarks.measure import quiet
from benchmarks.report import FULL_RUN, keep_rows
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.manifest import manifest_of, model_of_tenant
from unified_cache.storage_backends.offline.listing import count_objects, total_of
from unified_cache.storage_backends.offline.stores import open_to_read
from unified_cache.storage_backends.protocol import Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.tree import RadixTree

RESULTS = FULL_RUN.with_name("growth.json")
PICTURE = FULL_RUN.parents[2] / "docs" / "growth.png"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
UNITS = {"open": "s", "memory": "bytes a page", **dict.fromkeys(("exists", "get", "put"), "us a page"), "stat": "s"}
BATCH = 64
ROUNDS = 40
OBJECT_BYTES = HEADER_BYTES + 128
"""Small, so that ten million pages of a packed store take 3 GB: what grows with pages does not ask for their bytes."""
PROMPT_PAGES, PAGE_SIZE, VOCABULARY = 32, 16, 128_000
"""Of the tree: every other prompt begins with the first half of the one before."""
LAYOUT = ModelLayout(PAGE_SIZE, (Full((PoolSpec("kv", OBJECT_BYTES - HEADER_BYTES),)),))
CLIENTS, TENANTS = Identity("growth"), Identity(model_of_tenant("default", "growth"))
"""The same pages, as who uses a store names them, and as a service stores them."""

Figures = dict[str, float]
Result = TypeVar("Result")


class GrowthRow(NamedTuple):
    """Costs of one kind of so many pages."""

    kind: str
    pages: int
    figures: Figures


def resident_bytes(process: int | str = "self") -> int:
    """Return the memory that a process has in RAM."""
    words = dict(line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(words["VmRSS"].split()[0]) << 10


def pages(numbers: Sequence[int], identity: Identity = CLIENTS) -> list[PageIO]:
    """Make sealed pages by their numbers."""
    digest = identity.digest(LAYOUT)
    labels = [Label(digest, hashlib.sha256(b"%d" % number).digest(), "kv") for number in numbers]
    made = [PageIO(label, (memoryview(bytearray(OBJECT_BYTES)),)) for label in labels]
    for label, buffers, _ in made:
        seal_buffers(buffers, label)
    return made


def fill(url: str, count: int, identity: Identity) -> int:
    """Put so many pages; return what they take of a cap."""
    with closing(open_storage(url)) as store:
        store.register(manifest_of(identity, LAYOUT), {})
        for start in range(0, count, 512):
            assert all(store.put(pages(range(start, min(start + 512, count)), identity), Level.CACHED))
        return count * store.capability().taken_bytes(OBJECT_BYTES)


def medians(calls: Mapping[str, Callable[[int], object]], pages_count: int) -> Figures:
    """Time calls in turns, each given the number of its round; us a page."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with quiet():
        for number in range(ROUNDS):
            for name, call in calls.items():
                start = perf_counter()
                call(number)
                taken[name].append((perf_counter() - start) / pages_count * 1e6)
    return {name: statistics.median(values) for name, values in taken.items()}


def newer(count: int) -> list[list[int]]:
    """Draw numbers of pages, or of prompts, that are there."""
    draw = random.Random(7)
    return [draw.choices(range(count // 2, count), k=BATCH) for _ in range(2 * ROUNDS)]


def calls_of(store: Store, count: int) -> Figures:
    """Time calls of a store that holds so many pages and has no room."""
    there = [pages(numbers) for numbers in newer(count)]
    labels = [[page.label for page in some] for some in there]
    new = [pages(range(start, start + BATCH)) for start in range(count, count + (ROUNDS + 1) * BATCH, BATCH)]
    assert all((*store.get(there[0]), *store.put(new.pop(), Level.CACHED)))
    calls = {
        "exists": lambda number: store.exists(labels[number]),
        "get": lambda number: store.get(there[ROUNDS + number]),
        "put": lambda number: store.put(new[number], Level.CACHED),
    }
    return medians(calls, BATCH)


def of_directory(url: str, count: int, bytes_max: int) -> Figures:
    """Open a store under the cap that it fills, and time its calls."""
    before, start = resident_bytes(), perf_counter()
    with closing(open_storage(url, bytes_max=bytes_max)) as store:
        figures = {"open": perf_counter() - start}
        gc.collect()
        figures |= {"memory": (resident_bytes() - before) / count} | calls_of(store, count)
    with closing(open_to_read(url)) as store:
        return figures | {"stat": stat(store, count)}


def of_service(url: str, count: int, bytes_max: int) -> Figures:
    """Start a server, and time calls from another process."""
    socket = Path(f"{url.partition(':')[2]}.sock")
    program = "import sys; from unified_cache.cli.main import main; sys.exit(main())"
    options = ["--listen", f"unix:{socket}", "--storage", url, "--storage-bytes", str(bytes_max)]
    start = perf_counter()
    with subprocess.Popen([sys.executable, "-c", program, "serve", *options], stderr=subprocess.DEVNULL) as server:
        try:
            while not socket.exists() and server.poll() is None:
                sleep(0.02)
            figures = {"open": perf_counter() - start, "memory": resident_bytes(server.pid) / count}
            with closing(open_storage(f"grpc://unix:{socket}?timeout_s=100")) as store:
                store.register(manifest_of(CLIENTS, LAYOUT), {})
                return figures | calls_of(store, count) | {"stat": stat(store, count)}
        finally:
            server.terminate()


def stat(store: Store, count: int) -> float:
    """Count what a store holds, as ``storage stat`` does; in seconds."""
    start = perf_counter()
    assert total_of([count_objects(store, CLIENTS.digest(LAYOUT))]).objects_count > count - 2 * ROUNDS * BATCH
    return perf_counter() - start


def of_tree(count: int) -> Figures:
    """Insert prompts into a tree of full attention and a window, and ask it for them."""
    window = SlidingWindow(4 * PAGE_SIZE, PAGE_SIZE, (PoolSpec("swa", 0),))
    before, tree = resident_bytes(), RadixTree((Full((PoolSpec("kv", 0),)), window), PAGE_SIZE)

    def tokens(number: int) -> Prompt:
        halves = (np.random.default_rng(each) for each in (number // 2, -number % (1 << 63)))
        drawn = [half.integers(0, VOCABULARY, PROMPT_PAGES * PAGE_SIZE // 2, dtype=np.int32) for half in halves]
        return Prompt.of(np.concatenate(drawn), PAGE_SIZE)

    def insert(prompt: Prompt, number: int, evicted_pages: int = 0) -> None:
        tree.evict(Tier.DEVICE, 0, evicted_pages)
        start = tree.match(prompt).device_end
        slots = np.arange(number * PROMPT_PAGES + start, (number + 1) * PROMPT_PAGES, dtype=np.int32)
        tree.insert(prompt, start, [slots + 1, slots + 1], Tier.DEVICE)

    def lock(prompt: Prompt) -> None:
        found = tree.match(prompt)
        tree.unlock(tree.lock(found, found.device_end, Tier.DEVICE))

    prompts_count = count // (PROMPT_PAGES * 3 // 4)
    for number in range(prompts_count):
        insert(tokens(number), number)
    memory = (resident_bytes() - before) / count
    there = [tokens(numbers[0]) for numbers in newer(prompts_count)]
    new = list(map(tokens, range(prompts_count, prompts_count + ROUNDS)))
    lock(there[0])  # what was inserted is counted with the first lock
    calls = {
        "exists": lambda number: tree.match(there[number]),
        "get": lambda number: lock(there[ROUNDS + number]),
        "put": lambda number: insert(new[number], prompts_count + number, PROMPT_PAGES),
    }
    return {"memory": memory} | medians(calls, PROMPT_PAGES)


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a process that has done nothing else."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def of_store(kind: str, count: int) -> Figures:
    """Fill a store and measure it."""
    identity, measure = (TENANTS, of_service) if kind == "service" else (CLIENTS, of_directory)
    with tempfile.TemporaryDirectory() as place:
        url = f"{kind.replace('service', 'packed')}:{place}/store"
        return apart(measure, url, count, apart(fill, url, count, identity))


KINDS = {"packed": SIZES[-1], "service": SIZES[-1], "file": SIZES[-2], "tree": SIZES[-2]}
"""Pages that each kind is measured with at most."""


def show(rows: Sequence[GrowthRow]) -> None:
    """Print a row for each kind and figure, a column for each size, and draw the same."""
    sizes = sorted({row.pages for row in rows})
    print("| | ", *(f"| {size:,} " for size in sizes), "|\n|---|", "---:|" * len(sizes), sep="")
    for kind, name in ((kind, name) for kind in KINDS for name in UNITS):
        found = {row.pages: f"{row.figures[name]:.3g}" for row in rows if row.kind == kind and name in row.figures}
        if found:
            print(f"| {kind}: {name}, {UNITS[name]} |", " | ".join(found.get(size, "") for size in sizes), "|")
    figure = Figure((11.0, 6.0), layout="constrained")
    for place, (name, unit) in enumerate(UNITS.items(), 1):
        axes = figure.add_subplot(2, 3, place, title=f"{name}, {unit}", xscale="log", yscale="log")
        for kind in KINDS:
            points = [(row.pages, row.figures[name]) for row in rows if row.kind == kind and name in row.figures]
            axes.plot([pages for pages, _ in points], [value for _, value in points], marker="o", label=kind)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    figure.savefig(PICTURE, dpi=90)


def main(words: Sequence[str]) -> None:
    """Measure, keep, print and draw."""
    sizes = [int(word.replace("_", "")) for word in words if word[0].isdigit()] or SIZES
    for kind in [word for word in words if word in KINDS] or KINDS:
        for count in (size for size in sizes if size <= KINDS[kind]):
            figures = apart(of_tree, count) if kind == "tree" else of_store(kind, count)
            keep_rows([GrowthRow(kind, count, figures)._asdict()], RESULTS, ("kind", "pages"))
    show(sorted(GrowthRow(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    main(sys.argv[1:])
