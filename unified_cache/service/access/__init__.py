"""Access to the service: authentication, roles, quotas and fair scheduling of tenants.

gate      the one way into every call and out of it; ``timeouts``: its limits in time
callers   ``Caller``, ``Refused``, and ``Observer``, the protocol of what counts and logs calls
tls       certificates of the server and of clients, and what is revoked
tokens    bearer tokens and their file
fairness  fair scheduling of the calls in flight, tenant by tenant
usage     pages stored by each tenant and their bytes, under its cap and its share of the store
registry  registered identities by tenant, and their names in the store
reloaded  a value that is read again when its files change
"""
