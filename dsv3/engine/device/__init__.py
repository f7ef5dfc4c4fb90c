"""What runs on the devices of one process: arrays, decode state, compiled programs, and sampling."""
