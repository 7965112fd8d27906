"""Views of a running cache for people, monitoring and routers; no request waits for them.

    metrics   figures for Prometheus
    live      a page in the browser
    events    KV events for routers, as vLLM and SGLang publish them

Imports cache, controller and core.
"""
