"""Recordings: what is written of requests, in bounds, without a prompt; and that a replay of one hits the same."""
