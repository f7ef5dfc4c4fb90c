"""Makes grammars in a process of its own, which can be killed."""
