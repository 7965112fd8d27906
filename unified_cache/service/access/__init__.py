"""Who calls and what they may use: certificates, tokens, tenants, quotas, fair turns.

gate      the one way into every call: authenticate, check the role, wait for a turn
callers   ``Caller``, ``Role``, and the protocols that the request path asks
tls       certificates of the server and of clients; ``tokens``: bearer tokens
fairness  calls in flight by tenant, served in fair turns
quota     bytes stored by tenant; ``usage``: which pages they are
registry  identities by tenant, and what the store calls them
reloaded  a value read again when its files change; ``errors``: what a call is refused with
"""
