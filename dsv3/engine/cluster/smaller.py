"""Options of an instance that goes on with fewer nodes than it was started with."""

import dataclasses
import logging
from pathlib import Path

import jax

from dsv3.config.hugging_face import load_config
from dsv3.config.options import ClusterOptions, EngineOptions

_log = logging.getLogger("dsv3.cluster")


def fitted(options: EngineOptions, model_dir: Path, given: ClusterOptions, cluster: ClusterOptions) -> EngineOptions:
    """Returns the options for the processes of `cluster`, of those that were `given`; with jax started over them.

    Each device that is left is a rank, or part of one, as before. It stores as many replicas of experts as before
    where all experts fit so, else as few more as they need. Every process finds the same.
    """
    if cluster.num_processes == given.num_processes:
        return options
    devices, redundant = jax.device_count(), options.num_redundant_experts
    if options.spreads_experts:
        experts = load_config(model_dir).n_routed_experts
        before = devices * given.num_processes // cluster.num_processes
        redundant = redundant_experts(experts, experts + redundant, before, devices)
        _log.warning("%d devices are left of %d, with %d redundant experts", devices, before, redundant)
    ranks = devices // options.tensor_parallel_size
    return dataclasses.replace(options, data_parallel_size=ranks, num_redundant_experts=redundant)


def redundant_experts(experts: int, replicas: int, before: int, devices: int) -> int:
    """Returns how many more replicas than experts to store on `devices` that are fewer than `before`."""
    per_device = max(replicas // before, -(-experts // devices))
    return per_device * devices - experts
