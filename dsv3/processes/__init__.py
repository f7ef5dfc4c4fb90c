"""Child processes, msgpack frames between processes, and the TLS credentials of an instance."""
