"""The store behind the service: any ``StorageBackend``, guarded, and shared by tenants."""
