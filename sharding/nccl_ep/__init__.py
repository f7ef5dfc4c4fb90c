"""Expert parallelism on NVIDIA's `libnccl_ep`: its low-latency dispatch and combine as XLA custom calls."""
