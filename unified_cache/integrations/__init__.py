"""Engines that embed the cache, one package each; each needs the extra of its name.

    transformers   stock models over ``UnifiedCache``
    vllm           a secondary tier of vLLM's offloading
    sglang         a storage backend of SGLang's HiCache
    ranges         versions of an engine that ours are checked with
    engine_store   the store that the last two stand on: never raises, returns in time, verifies, counts

Imports cache and below.
"""
