"""Replay a request trace against a cache of given tier sizes, every byte verified against an oracle.

What ran is held against two others, for which nothing need run, after the replay:

trace_pages   pages of every prompt as numbers, 4 bytes each
lru_stack     how much memory each page asked for would have needed to be held (exact for LRU)
clairvoyant   what the best policy that knows the future would hit
references    both beside what ran: hits over the run, and missed tokens that they would have had, by reason
"""
