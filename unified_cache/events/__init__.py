"""KV events: what each tier holds, told to routers over ZMQ; and an index of what engines have told."""
