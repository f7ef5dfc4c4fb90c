"""KV offload tiers below the devices: host memory, directories, object stores."""
