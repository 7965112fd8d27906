"""Kinds of state that models keep per page, as constructors of ``Component``, each with its own ``window(end)``.

kind              span in pages                  mapped
Full              all of them                    no
SlidingWindow     window_tokens / page_size, up  yes
RecurrentState    1                              no

Layouts of models, in ``layouts``, are made of them.
"""

from unified_cache.core.errors import LayoutError
from unified_cache.core.pool import Component, PoolSpec
from unified_cache.core.window import SPAN_ALL

__all__ = ["Full", "RecurrentState", "SlidingWindow"]


def Full(pools: tuple[PoolSpec, ...]) -> Component:
    """Make full attention: a resume needs every page since the root, and every other component needs it below.

    ``pools`` are the anchor, then the sidecars that share its slots; so for every kind.
    """
    return Component("full", SPAN_ALL, pools)


def SlidingWindow(window_tokens: int, page_size: int, pools: tuple[PoolSpec, ...]) -> Component:
    """Make sliding-window attention (SWA): a resume needs the pages that hold the last ``window_tokens`` tokens.

    ``window_tokens`` counts the tokens before the next one that the model looks back on. Where a config's window
    counts the query itself, as in transformers, this is one less.

    Raises:
        LayoutError: a window or a page without tokens, or a window that spans ``SPAN_ALL`` pages.
    """
    for name, value in (("window_tokens", window_tokens), ("page_size", page_size)):
        # A bool is an int to Python, and no window.
        if type(value) is not int or value <= 0:
            raise LayoutError(f"{name} of a sliding window must be a positive integer, found {value!r}")
    span = -(-window_tokens // page_size)
    if span >= SPAN_ALL:
        raise LayoutError(f"window_tokens must span fewer than {SPAN_ALL} pages, found {window_tokens}")
    return Component("swa", span, pools, mapped=True, page_size=page_size)


def RecurrentState(pools: tuple[PoolSpec, ...]) -> Component:
    """Make recurrent state (Mamba, linear attention): one state, valid at exactly one length.

    A page holds the state after the page's last token, whatever the page size, so a resume at ``end`` needs page
    ``end - 1`` alone. Most pages are tombstones: a state exists where a checkpoint was taken.
    """
    return Component("mamba", 1, pools)
