"""Answers from a cached prefix, compared with those from a cold one, at any OpenAI-compatible server.

server    completions over HTTP, and the counters of cached tokens
trial     documents with planted facts, and the phases: cold, device, branches, at once, salts, host, storage, restart
result    distances and verdicts
"""
