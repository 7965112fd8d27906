"""The adapters under the real engines, each in an environment of its own: run by make e2e-..., not by make test."""
