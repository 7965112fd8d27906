"""The store behind the service: any ``StorageBackend``, shared by tenants.

tenants  the store with quotas, shares and counts
guarded  the backend opened and guarded, with its metrics
"""
