"""What runs on the devices of one process: state, compiled programs, and the executor that launches them."""
