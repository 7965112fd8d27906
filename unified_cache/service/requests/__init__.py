"""What a call passes from its first message to its answer.

calls          a call admitted, measured, and refused without telling internals
checks         messages checked before anything is done
lookup         longest restorable prefix
arrivals       pages put together from a stream of parts
streams        streams that stand still or never end are cancelled
shared_memory  memory that callers on the same machine lend
sweep          a thread that looks after what may be late
"""
