"""The contract of the service as both ends use it: calls, labels and pages as messages, shared memory.

calls          the calls of the contract and the trailing metadata of refusals
names          labels as runs of keys
parts          pages cut into the messages of a stream, without a copying parser
local_sockets  sockets that two processes of one machine meet at
links          calls over such a socket
sharing        pages in memory that two processes of one machine share
"""
