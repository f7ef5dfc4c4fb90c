"""A load of streamed requests and what became of each: `stream` sends one, `load` many."""
