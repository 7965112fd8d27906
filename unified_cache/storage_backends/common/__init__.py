"""Parts that stores of any kind share: names and LRU order of objects, chains of pages, calls in flight, breaker.

names    names of objects: checked, and read back into labels
lru      LRU order and byte count of stored objects
chains   which object is useless without which page
calls    close a store once no call is in flight any more
backoff  pauses that double up to a bound
breaker  leaves alone for a while what keeps failing
"""
