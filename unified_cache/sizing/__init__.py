"""Programs that measure a cache before it is deployed: replays, plans, reports, a demo. No library code imports them.

What cannot be used or does not fit is a ``ConfigError``, what is no trace a ``TraceError``.
Imports every room below, integrations and testing among them.
"""
