"""Step metrics: tells planners what each step did and how long it took, as Dynamo's `ForwardPassMetrics`; no jax."""
