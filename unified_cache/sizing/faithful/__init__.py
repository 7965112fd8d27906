"""Answers from a cached prefix, compared with those from a cold one, at any OpenAI-compatible server."""
