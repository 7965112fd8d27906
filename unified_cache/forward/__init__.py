"""Slots that a forward reads and writes, in every pool, translated once per forward. Imports core.

The scheduler calls it before the kernels run; as init_forward_metadata in SGLang 0.5.23.
"""

from unified_cache.core.extras import needs_extra

with needs_extra("engine", "unified_cache.forward"):
    from unified_cache.forward.batch import PADDING_LOC, ForwardBatch, ForwardMode
    from unified_cache.forward.graph import GraphBucket, GraphBuffers, HybridGraphBuffers
    from unified_cache.forward.metadata import (
        AttentionMetadata,
        HybridAttentionMetadata,
        LayerKind,
        init_metadata,
        write_locs,
    )
    from unified_cache.forward.translation import SwaTranslation

__all__ = [
    "PADDING_LOC",
    "AttentionMetadata",
    "ForwardBatch",
    "ForwardMode",
    "GraphBucket",
    "GraphBuffers",
    "HybridAttentionMetadata",
    "HybridGraphBuffers",
    "LayerKind",
    "SwaTranslation",
    "init_metadata",
    "write_locs",
]
