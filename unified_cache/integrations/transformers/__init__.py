"""Stock models of transformers 5 over the prefix cache: cached state is restored into the model's own cache object.

    pages = KeptState.of(model).allocate(config.device_pages)
    cache = UnifiedCache.open(pages.layout, config, pages.pools, identity=Identity("my-model"))
    run = PrefixCachedModel(model, cache, pages).generate(tokens, tokens_max=64)
    for token in run: ...
    print(run.answer)

``DevicePages`` is the seam between the two: ``restore`` fills a cache object of the model from pages on the device,
``capture`` copies what it holds at a page boundary into such pages. An engine with a loop of its own drives
``Sequence`` step by step; ``PrefixCachedModel`` is the loop for one request at a time.
"""

from unified_cache.core.extras import needs_extra

with needs_extra("transformers", "unified_cache.integrations.transformers"):
    from unified_cache.integrations.transformers.layer_rows import LayerRows, LayerState, layer_state
    from unified_cache.integrations.transformers.model import Completion, Generation, PrefixCachedModel, greedy
    from unified_cache.integrations.transformers.pages import DevicePages, KeptState, Strand
    from unified_cache.integrations.transformers.sequence import Sequence, Stage

__all__ = [
    "Completion",
    "DevicePages",
    "Generation",
    "KeptState",
    "LayerRows",
    "LayerState",
    "PrefixCachedModel",
    "Sequence",
    "Stage",
    "Strand",
    "greedy",
    "layer_state",
]
