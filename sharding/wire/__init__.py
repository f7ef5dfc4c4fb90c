"""What crosses a link: rows packed into words, and collectives in two halves."""
