"""vLLM's adapter without vLLM."""
