"""The request path: from the first message of a call to its answer.

checks      messages, checked before anything is done
lookup      longest restorable prefix of a prompt
assembler   pages put together from the parts of a stream
"""
