"""Layouts of models: from their Hugging Face configuration, or of published ones by name."""

from unified_cache.components.layouts.hf_config import from_hf_config, size_hf_config
from unified_cache.components.layouts.presets import PRESETS, is_preset, layout, preset_config, size_preset
from unified_cache.components.layouts.sizes import COST_TOKENS, ComponentCost, SizedLayout

__all__ = [
    "COST_TOKENS",
    "PRESETS",
    "ComponentCost",
    "SizedLayout",
    "from_hf_config",
    "is_preset",
    "layout",
    "preset_config",
    "size_hf_config",
    "size_preset",
]
