"""The store behind the service: any ``StorageBackend``, shared by tenants.

tenants  the store with quotas, shares and counts
pages    a sealed page on its way, header apart
guarded  the backend opened and guarded, with its metrics
"""
