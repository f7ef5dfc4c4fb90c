"""One engine over the devices of several processes: the leader plans and sends commands, followers execute them."""
