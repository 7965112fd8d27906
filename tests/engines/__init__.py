"""The adapters under the real engines, each in an environment of its own: run by make e2e-vllm, not by make test."""
