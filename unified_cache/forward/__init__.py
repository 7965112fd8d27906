"""Slots that a forward reads and writes, in every pool, translated once per forward between scheduler and kernels."""

from unified_cache.extras import needs_extra

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
