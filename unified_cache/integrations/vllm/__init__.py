"""vLLM stores its KV through any store of this package, unmodified: see docs/vllm.md.

    settings    keys that a user writes into vLLM's configuration
    facts       what vLLM's configuration says about the bytes of a page
    lookups     answers of the store that requests wait for
    chunks      the tier without vLLM's types: names, looks up, loads and stores chunks, and tells what the store loses
    logs        log lines of this package beside vLLM's
    metrics     figures of the tier under vLLM's names
    engine      what is taken from vLLM, wherever its version has it; imports vLLM
    tier        ``UnifiedCacheTier``, an out-of-tree secondary tier; imports vLLM
    connector   ``UnifiedCacheConnector``, an out-of-tree connector over that tier; imports vLLM

Only the last three need vLLM, and they are imported by it. `engine` knows in what versions differ.
"""
