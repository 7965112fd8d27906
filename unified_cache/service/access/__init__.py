"""Access to the service: authentication, roles, quotas and fair scheduling of tenants; ``gate`` is the way in."""
