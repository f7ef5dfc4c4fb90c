"""What a deployment needs and how fast it could be, from the real programs compiled without a GPU."""
