"""KV events between this library and the engines own decoders and publishers: run by make e2e-events."""
