"""Answers from a cached prefix, compared with those from a cold one, at any OpenAI-compatible server.

server    completions over HTTP, and the counters of cached tokens
prompts   documents with planted facts, and questions about them
trial     the phases: cold, device, branches, ends of pages, at once, salts, host, storage, restart
result    distances, verdicts, and the page
"""
