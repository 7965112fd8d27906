"""``unified-cache demo``: a real model that answers questions about a document while its cache loses tier after tier.

    serving   the process that computes: the model over the cache, asked through a pipe
    run       the phases, in order; its process and its files are gone when it ends
    result    answers, waits and the verdict, as values
    picture   the same as a page and as a picture

The process that shows it needs no torch. Needs the extra ``demo``.
"""

from importlib.util import find_spec

from unified_cache.core.extras import needs_extra

with needs_extra("demo", "the demo"):
    for name in ("torch", "transformers", "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
