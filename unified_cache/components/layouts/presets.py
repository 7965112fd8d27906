"""Layouts of published models by name: of the fields of their ``config.json`` that a layout depends on.

``published.json`` has the fields, read like any other configuration; counts and dimensions are the published ones.
Last entries of ``compress_ratios`` may be those of draft (MTP) layers, which are no part of a layout.
"""

import json
from collections.abc import Mapping
from importlib.resources import files

from unified_cache.components.layouts.hf_config import size_hf_config
from unified_cache.components.layouts.sizes import SizedLayout
from unified_cache.core.errors import LayoutError, did_you_mean
from unified_cache.core.pool import ModelLayout

_PUBLISHED = json.loads(files("unified_cache.components.layouts").joinpath("published.json").read_bytes())
PRESETS: Mapping[str, Mapping[str, object]] = _PUBLISHED["models"]
"""By name."""
PRESET_ALIASES: Mapping[str, str] = _PUBLISHED["aliases"]


def is_preset(name: str) -> bool:
    """Return whether a preset has this name or alias; upper and lower case are alike."""
    return PRESET_ALIASES.get(name.lower(), name.lower()) in PRESETS


def preset_config(name: str) -> Mapping[str, object]:
    """Return the fields of a published model; a LayoutError if no preset has this name."""
    if not is_preset(name):
        close = did_you_mean(name, (*PRESETS, *PRESET_ALIASES))
        raise LayoutError(f"a preset must be one of {', '.join(PRESETS)}, found {name!r}{close}")
    return PRESETS[PRESET_ALIASES.get(name.lower(), name.lower())]


def layout(name: str, *, page_size: int | None = None, dtype: str | None = None) -> ModelLayout:
    """Return the layout of a published model; arguments and errors as for ``from_hf_config``."""
    return size_preset(name, page_size=page_size, dtype=dtype).layout


def size_preset(name: str, *, page_size: int | None = None, dtype: str | None = None) -> SizedLayout:
    """Return what ``layout`` returns, together with the layers behind each pool."""
    return size_hf_config(preset_config(name), page_size=page_size, dtype=dtype)
