"""What stores of any kind share: the LRU order of objects, chains of pages, and the life cycle of calls.

lru      LRU order and byte count of stored objects
chains   which object is useless without which page
calls    close a store once no call is in flight any more
"""
