"""The example engine over a tiny model as a server of completions, whose hits may be wrong. A token is a word."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any
from zlib import crc32

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from examples.continuous_batching import SINK, BatchingEngine, GenerationRequest, RequestOutcome, TierSizes, opened
from tests.support.exactness import page_size_of
from tests.support.toy_completions import serving
from unified_cache import Namespace
from unified_cache.controller.memory import Copied, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots
from unified_cache.integrations.transformers import DevicePages, KeptState
from unified_cache.testing.tiny_models import VOCABULARY, tiny_model

__all__ = ["ModelFault", "model_server"]

SIZES = TierSizes(device_pages=20, host_pages=400)
TOP = 5


class ModelFault(Enum):
    """Flaw of a hit, with every page sound where the cache keeps it."""

    NOTHING = auto()
    STALE = auto()
    """The first page that comes from the host is not copied: its slot has what it had before."""
    OTHERS = auto()
    """The first page that comes from the host is one of another request."""
    SHORT = auto()
    """The first page of a sliding window is missing."""
    SWAPPED = auto()
    """K and V of a layer."""
    ZEROS = auto()
    """A layer of them."""
    STATE = auto()
    """The recurrent state of the hit before."""


class ScoredToken(int):
    """A token with the logprobs that it was chosen by."""

    top: dict[str, float]


def scored(logits: torch.Tensor) -> ScoredToken:
    """Choose the likeliest token."""
    best = logits.float().log_softmax(-1).topk(TOP)
    token = ScoredToken(best.indices[0])
    token.top = {f"t{each}": value for each, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
    return token


class EngineCompletions:
    """The engine on a thread of its own; those who wait for an answer have it do one iteration after another."""

    def __init__(self, engine: BatchingEngine, thread: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._thread = thread
        self.page_tokens = engine.pages.layout.page_size
        self.device_pages = min(engine.cache.config.device_pages)
        self.hit_tokens = 0

    def complete(self, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
        ids = [crc32(word) % VOCABULARY for word in re.findall(rb"\S+", prompt.encode())]
        request = GenerationRequest(ids, tokens, namespace=Namespace(cache_salt=salt or None))
        assert self._thread.submit(self._engine.submit, request).result()
        while request.outcome is None:
            self._thread.submit(self._engine.step).result()
        assert request.outcome is RequestOutcome.FINISHED
        top = [token.top for token in request.generated if isinstance(token, ScoredToken)]
        words = [next(iter(each)) for each in top]
        self.hit_tokens += request.reused.total
        return {
            "choices": [{"text": " ".join(words), "logprobs": {"tokens": words, "top_logprobs": top}}],
            "usage": {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": request.reused.total}},
        }


@contextmanager
def model_server(
    family: str, dtype: torch.dtype, fault: ModelFault, patch: Callable[[type, str, object], None]
) -> Iterator[str]:
    """Serve a tiny model until the block ends; yields the URL. ``patch`` is that of a monkeypatch."""
    patch(DevicePages, "restore", lying_restore(fault))
    patch(TieredMemory, "load_layer", lying_load(fault))
    torch.set_num_threads(1)  # how a sum is split among threads shows in its last bits
    model = tiny_model(family).to(dtype)  # type: ignore[arg-type]  # as its wrapper is typed
    kept = KeptState.of(model, page_size_of(family))
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        engine = opened(family, kept, SIZES, choose=scored)
        made = thread.submit(engine.__enter__).result()
        stack.callback(lambda: thread.submit(engine.__exit__, None, None, None).result())
        with serving(EngineCompletions(made, thread)) as url:
            yield url


def lying_restore(fault: ModelFault) -> Callable[[DevicePages, list[Slots], int], DynamicCache]:
    """Return a restore from the device with a fault."""
    restore = DevicePages.restore
    states: list[Slots] = []
    """Slots of the state of each hit."""

    def lying(pages: DevicePages, slots: list[Slots], end: int) -> DynamicCache:
        if end and fault is ModelFault.SHORT:
            slots = [*slots[:-1], np.where(np.arange(len(slots[-1])), slots[-1], SINK).astype(np.int32)]
        elif end and fault is ModelFault.STATE:
            states.append(slots[-1])
            slots = [*slots[:-1], states[max(0, len(states) - 2)]]
        past = restore(pages, slots, end)
        layer: Any = next((each for each in past.layers if isinstance(each, DynamicLayer)), None)
        if end and layer is not None and fault is ModelFault.SWAPPED:
            layer.keys, layer.values = layer.values, layer.keys
        elif end and layer is not None and fault is ModelFault.ZEROS:
            layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
        return past

    return lying


def lying_load(fault: ModelFault) -> Callable[[TieredMemory, PoolSpec, int, Slots, Slots], Copied]:
    """Return a load from the host with a fault."""
    load = TieredMemory.load_layer
    last: dict[tuple[str, int], int] = {}
    """The last page that was loaded into a layer."""

    def lying(memory: TieredMemory, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        if fault is ModelFault.STALE:
            source, target = source[1:], target[1:]
        elif fault is ModelFault.OTHERS:
            first = last.get((pool.name, layer), source[0])
            last[pool.name, layer] = source[-1]
            source = np.concatenate(([first], source[1:])).astype(source.dtype)
        return load(memory, pool, layer, source, target)

    return lying
