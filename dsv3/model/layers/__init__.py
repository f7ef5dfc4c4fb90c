"""The parts of a decoder layer: attention, router, experts, and the products and norms that they share."""
