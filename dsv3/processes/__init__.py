"""Child processes; msgpack frames, TLS credentials and the listener for connections between processes."""
