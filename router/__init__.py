"""Several instances behind one address: who takes a request, and where it goes on when that one dies. No jax."""
