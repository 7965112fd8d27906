"""What stores of any kind share: the LRU order of objects, chains of pages, life cycle of calls, circuit breaker.

lru      LRU order and byte count of stored objects
chains   which object is useless without which page
calls    close a store once no call is in flight any more
backoff  pauses that double up to a bound
breaker  leaves alone for a while what keeps failing
"""
