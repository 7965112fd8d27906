"""A tiny model over the cache as a server of completions, whose restored prefixes may be wrong. A token is a letter."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tests.support.exactness import CacheSizes, engine
from tests.support.toy_completions import serving
from unified_cache import Namespace
from unified_cache.core.pool import Slots
from unified_cache.integrations.transformers import DevicePages, PrefixCachedModel
from unified_cache.testing.tiny_models import VOCABULARY

__all__ = ["ModelFault", "model_server"]

PAGES = 400
TOP = 5


class ModelFault(Enum):
    """Flaw of a restore, with every page in its place and sound."""

    NOTHING = auto()
    SWAPPED = auto()
    """K and V of a layer."""
    ZEROS = auto()
    """A layer of them."""
    STATE = auto()
    """The recurrent state of another request."""


class ModelCompletions:
    """The model on a thread of its own, which the cache belongs to."""

    def __init__(self, model: PrefixCachedModel, thread: ThreadPoolExecutor) -> None:
        self._model = model
        self._thread = thread
        self.hit_tokens = 0

    def complete(self, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
        return self._thread.submit(self._complete, prompt, salt, tokens).result()

    def _complete(self, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
        words: list[str] = []
        top: list[dict[str, float]] = []
        ids = [ord(letter) % VOCABULARY for letter in prompt]
        with self._model.prefill(ids, Namespace(cache_salt=salt or None)) as sequence:
            logits = sequence.logits
            assert logits is not None
            for _ in range(tokens):
                best = logits.float().log_softmax(-1).topk(TOP)
                top.append(
                    {f"t{i}": value for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
                )
                words.append(next(iter(top[-1])))
                logits = sequence.feed(int(best.indices[0]))
            cached = sequence.reused.tokens
        self.hit_tokens += cached
        return {
            "choices": [{"text": " ".join(words), "logprobs": {"tokens": words, "top_logprobs": top}}],
            "usage": {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}},
        }


@contextmanager
def model_server(family: str, fault: ModelFault, patch: Callable[[type, str, object], None]) -> Iterator[str]:
    """Serve a tiny model until the block ends; yields the URL. ``patch`` is that of a monkeypatch."""
    patch(DevicePages, "restore", lying_restore(fault))
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        opened = engine(family, shape=CacheSizes(PAGES, PAGES))
        model = thread.submit(opened.__enter__).result()
        stack.callback(lambda: thread.submit(opened.__exit__, None, None, None).result())
        with serving(ModelCompletions(model, thread)) as url:
            yield url


def lying_restore(fault: ModelFault) -> Callable[[DevicePages, list[Slots], int], DynamicCache]:
    """Return a restore with a fault."""
    restore = DevicePages.restore

    def lying(pages: DevicePages, slots: list[Slots], end: int) -> DynamicCache:
        if end and fault is ModelFault.STATE:
            slots = [*slots[:-1], np.where(slots[-1] > 1, slots[-1] - 1, slots[-1] + 1).astype(np.int32)]
        past = restore(pages, slots, end)
        layer: Any = next((each for each in past.layers if isinstance(each, DynamicLayer)), None)
        if end and layer is not None and fault is ModelFault.SWAPPED:
            layer.keys, layer.values = layer.values, layer.keys
        elif end and layer is not None and fault is ModelFault.ZEROS:
            layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
        return past

    return lying
