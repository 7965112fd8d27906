"""A store in a bucket of S3, Google Cloud Storage or Azure Blob Storage: ``s3://BUCKET/PREFIX``, ``gs:``, ``az:``."""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("object", "s3:, gs: or az:"):
    import_module("obstore")

__all__ = ()
