"""Engines that embed the cache, one package each; each needs the extra of its name."""
