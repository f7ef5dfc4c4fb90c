"""The front process: routes, bodies, server-sent events, the key, and how the process starts and ends."""
