"""Expert parallelism: dispatch and combine of token rows, traffic, expert placement and rebalancing."""
