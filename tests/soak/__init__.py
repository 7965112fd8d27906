"""Minutes of mixed load: what must hold for long, and not only once."""
