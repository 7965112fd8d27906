"""Messages of the service and of manifests, generated; ``wire``: calls and pages as both ends read them."""
