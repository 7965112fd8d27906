"""Programs that measure a cache before it is deployed; nothing in the library imports them.

    replay   a trace of requests through a real cache
    plan     hit ratios by size of each tier, from a trace or a recording
    report   their results as self-contained pages
    demo     a model served over the cache

What cannot be used or does not fit is a ``ConfigError``, what is no trace a ``TraceError``.
Imports every room below, integrations and testing among them.
"""
