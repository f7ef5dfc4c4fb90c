"""Pages from one instance to another: one serves what its host memory holds, another fetches what it lacks."""
