"""Replay a request trace against a cache of given tier sizes, every byte verified against an oracle."""
