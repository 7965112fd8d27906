"""KV events: the pages that each tier holds, published over ZMQ for the routers of vLLM and SGLang."""
