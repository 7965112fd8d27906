"""The store behind the service: any ``Store``, guarded, and shared by tenants."""
