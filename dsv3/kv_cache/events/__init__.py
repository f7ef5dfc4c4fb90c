"""KV events: tells routers which pages can be found, and when that ends, in vLLM's wire format."""
