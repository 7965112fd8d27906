"""The contract of the service as both ends use it: calls, labels and pages as messages.

calls  the calls of the contract and the trailing metadata of refusals
names  labels as runs of keys
parts  pages cut into the messages of a stream, without a copying parser
"""
