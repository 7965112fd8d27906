"""Views of a running cache: metrics, a live page, KV events for routers. No request waits for them.

Imports cache, controller and core.
"""
