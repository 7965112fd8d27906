"""Pages compressed and encrypted: what is left of their bytes, how fast that is on one core, and what a request gains.

The pages are those of a real model, SmolLM2-135M, rounded to bfloat16, over a document of this repository;
the same numbers in fp8; and noise. A rate is that of a page's own bytes through the layer over a store in memory,
beside the same store without it; a page is verified by its seal in both. What a request waits for before its first
token is a prefix read over a link that is held to 100 MB/s: coded pages against the same as they are.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import thread_time_ns

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.core.errors import MissingExtraError
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.integrations.transformers import layer_state
from unified_cache.integrations.transformers.pages import logits_of
from unified_cache.sizing.demo.run import DEFAULT_MODEL, model_path
from unified_cache.sizing.demo.serving import loaded
from unified_cache.storage_backends.manifest import EVERYBODY
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Store, page_bytes
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import StorageLayer, VerifiedStorage
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice

PREFIX_TOKENS = 1024
PAGE_SIZE = 64
LINK_BYTES_PER_S = 100e6
STORAGE_WORKERS = 2
"""As a cache has them by default."""
RATIO_MAX = {"bfloat16": 1 / 1.4, "fp8": 1 / 1.1, "noise": 1.0}
"""Largest accepted share of the bytes: what nvCOMP reaches in FlexKV, and nothing lost on noise."""
DOCUMENT = Path(__file__).parents[1] / "ARCHITECTURE.md"
KEYS_VARIABLE = "UNIFIED_CACHE_BENCH_PAGE_KEYS"
IDENTITY = sha256(b"coded").digest()
CHOICES = {
    "compressed": CodingChoice(compress=True),
    "encrypted": CodingChoice(keys=f"env:{KEYS_VARIABLE}"),
    "compressed and encrypted": CodingChoice(compress=True, keys=f"env:{KEYS_VARIABLE}"),
}


class HeldLink(StorageLayer):
    """A store in memory behind a link of a fixed rate, which its calls share. Thread-safe."""

    def __init__(self) -> None:
        self._memory = MemoryStorage()
        super().__init__(self._memory)
        self._link = Lock()

    def capability(self) -> Capability:
        """Return what the store can do; its calls wait."""
        return replace(self._memory.capability(), bounded=False)

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object."""
        return self._memory.lengths(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill the buffers as fast as the link allows."""
        with self._link:
            time.sleep(sum(map(page_bytes, pages)) / LINK_BYTES_PER_S)
        return self._memory.get(pages)


def coded_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Code the pages of a real model, then read them over the link; nothing where the model is not installed."""
    try:
        path = Path(model_path(DEFAULT_MODEL))
    except MissingExtraError:
        return
    os.environ[KEYS_VARIABLE] = f"* {'5c' * 32}"
    for name, payloads in _payloads(path).items():
        pages = [_page(number, payload) for number, payload in enumerate(payloads)]
        yield from _page_figures(name, pages, plan)
        if name == "bfloat16":
            yield from _link_figures(pages, plan)


def _payloads(path: Path) -> Mapping[str, list[bytes]]:
    """Compute the KV of a document, and return it page by page, in each dtype."""
    model, tokenizer = loaded(path.parent, path.name)
    ids = tokenizer(DOCUMENT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :PREFIX_TOKENS]
    past = DynamicCache(config=model.config)
    logits_of(model, past, ids)
    rows = [kept.rows for layer in past.layers for kept in layer_state(layer).read() if kept.rows is not None]
    kv = torch.stack(rows).transpose(1, 2)
    pages = [kv[..., start : start + PAGE_SIZE, :].contiguous() for start in range(0, PREFIX_TOKENS, PAGE_SIZE)]
    bfloat16 = [page.to(torch.bfloat16).view(torch.uint8).numpy().tobytes() for page in pages]
    fp8 = [page.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes() for page in pages]
    noise = [np.random.default_rng(number).bytes(len(payload)) for number, payload in enumerate(bfloat16)]
    return {"bfloat16": bfloat16, "fp8": fp8, "noise": noise}


def _coded(store: Store, choice: CodingChoice | None) -> CodedStorage:
    coded = CodedStorage(store, choice)
    coded.own([IDENTITY], EVERYBODY)
    return coded


def _page(number: int, payload: bytes) -> PageIO:
    label = Label(IDENTITY, sha256(b"%d" % number).digest(), "kv")
    page = memoryview(bytearray(HEADER_BYTES) + payload)
    seal_buffers((page,), label)
    return PageIO(label, (page,))


def _page_figures(name: str, pages: list[PageIO], plan: BenchmarkPlan) -> Iterator[Figure]:
    """Put and get the pages through each layer in turns with the bare store."""
    total_bytes = sum(page.buffers[0].nbytes for page in pages)
    memories = [MemoryStorage() for _ in range(1 + len(CHOICES))]
    stores = [VerifiedStorage(memories[0])]
    stores += [
        VerifiedStorage(_coded(memory, choice)) for memory, choice in zip(memories[1:], CHOICES.values(), strict=True)
    ]
    blanks = [PageIO(page.label, (memoryview(bytearray(page.buffers[0].nbytes)),)) for page in pages]
    rounds = plan.effort.copy_rounds
    puts = interleaved([_of_processor(partial(_put_anew, store, pages)) for store in stores], rounds)
    gets = interleaved([_of_processor(partial(store.get, blanks)) for store in stores], rounds)
    compressed = memories[1].bytes_used / total_bytes
    of_own = Comparison("its own bytes", 1.0, compressed, at_most=RATIO_MAX[name])
    yield Figure("coded", f"{name}, part of the bytes that is stored", "", Spread.of([compressed]), (of_own,))
    for verb, taken in (("put", puts), ("get", gets)):
        bare = Spread.of([total_bytes * 1e3 / ns for ns in taken[0]])
        for choice, each in zip(CHOICES, taken[1:], strict=True):
            rate = Spread.of([total_bytes * 1e3 / ns for ns in each])
            beside = Comparison("as it is", bare.median, rate.median / bare.median)
            yield Figure("coded", f"{name}, {verb}, {choice}", "MB/s", rate, (beside,), "of a core's time")


def _of_processor(call: Callable[[], object]) -> Subject:
    """Make a subject of a call that counts the time of its thread on a core."""

    def subject() -> int:
        start = thread_time_ns()
        call()
        return thread_time_ns() - start

    return subject


def _put_anew(store: Store, pages: Sequence[PageIO]) -> None:
    store.remove([page.label for page in pages])
    assert all(store.put(pages, Level.CACHED))


def _link_figures(pages: list[PageIO], plan: BenchmarkPlan) -> Iterator[Figure]:
    """Read a prefix over the link as a cache's workers do, each page by the next thread that is free."""
    choices = {"as they are": None, **CHOICES}
    stores = [VerifiedStorage(_coded(HeldLink(), choice)) for choice in choices.values()]
    blanks = [PageIO(page.label, (memoryview(bytearray(page.buffers[0].nbytes)),)) for page in pages]
    with ThreadPoolExecutor(STORAGE_WORKERS) as workers:
        subjects = [timed(partial(_read_all, workers, store, blanks)) for store in stores]
        for store in stores:
            assert all(store.put(pages, Level.CACHED))
        taken = interleaved(subjects, plan.effort.link_rounds)
    as_they_are, *coded = (Spread.of([ns / 1e6 for ns in each]) for each in taken)
    note = f"{PREFIX_TOKENS} tokens behind {LINK_BYTES_PER_S / 1e6:g} MB/s, {STORAGE_WORKERS} threads"
    yield Figure("coded", "a prefix, pages as they are", "ms", as_they_are, (), note)
    for name, spread in zip(CHOICES, coded, strict=True):
        beside = Comparison("as they are", as_they_are.median, spread.median / as_they_are.median)
        yield Figure("coded", f"a prefix, pages {name}", "ms", spread, (beside,), note)


def _read_all(workers: ThreadPoolExecutor, store: Store, pages: Sequence[PageIO]) -> None:
    assert all(answer for (answer,) in workers.map(store.get, [[page] for page in pages]))
