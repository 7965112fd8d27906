"""The request path, from the first message of a call to its answer: checks, look-ups, pages put together."""
