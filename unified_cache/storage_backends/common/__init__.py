"""Parts that stores of any kind share.

names         names of objects: checked, and read back into labels
lru           LRU order and byte count of stored objects
calls         close a store once no call is in flight any more
breaker       leaves alone for a while what keeps failing
bounded_call  a call that may hang, and the threads for it
"""
