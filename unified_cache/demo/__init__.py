"""A small serving engine over the prefix cache, and a workload to watch it with. Needs the extra ``transformers``."""
