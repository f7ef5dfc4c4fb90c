"""A package, for `api` is one."""
