"""API server processes: HTTP, routes, authentication, and how the processes start, drain and end."""
