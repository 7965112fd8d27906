"""Example 4: a hybrid model's three kinds of state, in tensors of the engine's own, over three tiers.

The "model" keeps of each page its tokens (full attention and a sliding window), and after each page a fingerprint of
all tokens so far (recurrent state), so that every byte that comes back can be checked. Of placeholders it keeps the
picture behind them.

python examples/hybrid_engine.py
"""
# ruff: noqa: T201 - an example prints to standard output

from collections.abc import Sequence
from tempfile import TemporaryDirectory

from unified_cache import (
    CacheConfig,
    DevicePool,
    Full,
    Identity,
    MediaItem,
    ModelLayout,
    PoolSpec,
    RecurrentState,
    SlidingWindow,
    UnifiedCache,
    open_storage,
)
from unified_cache.core.config import WritePolicy
from unified_cache.core.extras import needs_extra

with needs_extra("engine", "this example"):
    import torch

PAGE = 4  # tokens
PLACEHOLDER = 999
LAYERS = 2  # of each kind
KV, SWA = (PoolSpec(name, page_bytes=LAYERS * PAGE * 8) for name in ("kv", "swa_kv"))  # a token is 8 bytes in a layer
STATE = PoolSpec("state", page_bytes=LAYERS * 8)
LAYOUT = ModelLayout(PAGE, (Full((KV,)), SlidingWindow(8, PAGE, (SWA,)), RecurrentState((STATE,))))
CONFIG = CacheConfig(device_pages=(12, 6, 6), host_pages=(64, 32, 32), write=WritePolicy.THROUGH)  # by component


class HybridEngine:
    """An engine whose forward writes a function of the prompt alone."""

    def __init__(self, storage: str) -> None:
        """Make the tensors, one slot more than pages for the padding, and the cache that moves pages between tiers."""
        shapes = {KV: (PAGE,), SWA: (PAGE,), STATE: ()}
        slots = dict(zip(shapes, (pages + 1 for pages in CONFIG.device_pages), strict=True))
        self.tensors = {
            pool: [torch.zeros(slots[pool], *shape, dtype=torch.int64) for _ in range(LAYERS)]
            for pool, shape in shapes.items()
        }
        pools = [DevicePool(pool, layers) for pool, layers in self.tensors.items()]
        self.cache = UnifiedCache.open(LAYOUT, CONFIG, pools, identity=Identity("toy"), storage=open_storage(storage))

    def rows(self, tokens: Sequence[int], page: int) -> list[torch.Tensor]:
        """Return what each pool must hold of a page, in every layer."""
        page_tokens = torch.tensor(tokens[page * PAGE : (page + 1) * PAGE])
        return [page_tokens, page_tokens, torch.tensor(hash(tuple(tokens[: (page + 1) * PAGE])))]

    def serve(self, tokens: Sequence[int], picture: str = "") -> int:
        """Serve a prompt, with a picture behind its placeholders; return how many pages need not be computed."""
        cache = self.cache
        count = tokens.count(PLACEHOLDER)
        prompt = cache.prompt(tokens, media=[MediaItem(tokens.index(PLACEHOLDER), count, picture)] if count else ())
        tokens = [hash(picture) if token == PLACEHOLDER else token for token in tokens]  # what the forward sees
        with cache.bring(prompt) as request:  # storage to host to device
            request.wait(timeout_s=10)  # an engine polls between forwards instead
            reused = request.lock.end
            for component, layers in enumerate(self.tensors.values()):  # the forward reads all of Full, else a window
                slots = request.slots(component)
                for page, slot in zip(range(reused - len(slots), reused), slots.tolist(), strict=True):
                    for layer in layers:
                        assert torch.equal(layer[slot], self.rows(tokens, page)[component]), "a hit is never wrong"
            fresh = request.allocate()  # of windows and states what is worth keeping
            assert fresh is not None, "one request at a time pins nothing but its own pages"
            for page in range(reused, prompt.pages_count):
                for slots, layers, row in zip(fresh, self.tensors.values(), self.rows(tokens, page), strict=True):
                    if (slot := slots[page - reused]) >= 0:  # -1: no later request resumes from this page
                        for layer in layers:
                            layer[slot] = row
            request.insert()
        cache.wait_all(timeout_s=10)
        return reused


def main() -> None:
    """Serve a prompt, one that evicts it, its continuation, the prompt in an engine with empty memory, and pictures.

    Its tokens fill its pages, and the last token is always computed, for the logits after it: by itself it reuses all
    pages but the last, continued all of them.
    """
    prompt, other = list(range(40)), [7, *range(1, 40)]
    with TemporaryDirectory() as directory:
        engine = HybridEngine(f"file:{directory}")
        print(f"cold: {engine.serve(prompt)} of 10 pages reused")
        print(f"another prompt: {engine.serve(other)} of 10")
        print(f"continued, from host memory: {engine.serve([*prompt, 40, 41, 42, 43])} of 11")
        engine.cache.close()
        engine = HybridEngine(f"file:{directory}")
        print(f"restarted, from storage: {engine.serve(prompt)} of 10")
        looking = [*range(8), *[PLACEHOLDER] * 12, *range(20)]
        for picture in ("cat", "dog", "cat"):
            print(f"looking at a {picture}: {engine.serve(looking, picture)} of 10")
        engine.cache.close()


if __name__ == "__main__":
    main()
