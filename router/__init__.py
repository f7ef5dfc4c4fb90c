"""Several instances behind one address: selects one for a request, and another when that one dies. No jax."""
