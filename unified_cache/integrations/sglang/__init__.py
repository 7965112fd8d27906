"""SGLang over the cache's tree and stores. Modules are imported by name; each says whether it needs the engine."""
