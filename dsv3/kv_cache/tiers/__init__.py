"""Where pages go when they leave a device, and from where they come back: host memory, directories, object stores."""
