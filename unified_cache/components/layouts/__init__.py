"""Layouts of models: from their Hugging Face configuration, or of published ones by name."""

from unified_cache.components.layouts.hf_config import LayoutWarning, from_hf_config, size_by_hand, size_hf_config
from unified_cache.components.layouts.presets import (
    PRESET_ALIASES,
    PRESETS,
    is_preset,
    layout,
    preset_config,
    size_preset,
)
from unified_cache.components.layouts.sizes import COST_TOKENS, ComponentCost, SizedLayout

__all__ = [
    "COST_TOKENS",
    "PRESETS",
    "PRESET_ALIASES",
    "ComponentCost",
    "LayoutWarning",
    "SizedLayout",
    "from_hf_config",
    "is_preset",
    "layout",
    "preset_config",
    "size_by_hand",
    "size_hf_config",
    "size_preset",
]
