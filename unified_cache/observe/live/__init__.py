"""Live page: what a cache or a service holds and does now, in a browser and as JSON.

Its server runs on a thread of its own, and reads figures that were published for any thread; it never calls a cache.
Needs the extra ``live``. From the figures to the browser: ``figures``, ``updates``, ``readers``, ``server``.
"""

__all__ = ()
