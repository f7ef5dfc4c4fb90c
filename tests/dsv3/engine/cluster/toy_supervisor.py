"""The supervisor of a follower of the toy. It imports no jax, like that of a follower in service."""

import json
import os
import sys

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster.link import FollowOrder
from dsv3.engine.cluster.supervisor import Supervisor
from dsv3.processes.child import RestartPolicy

LOAD = "tests.dsv3.engine.cluster.toy_cluster:load"


def main(cluster: dict, model_dir: str, engine: dict) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"  # for its children, as in `toy_cluster`
    order = FollowOrder(ClusterOptions(**cluster), model_dir, EngineOptions(**engine), LOAD)
    sys.exit(Supervisor(order, RestartPolicy(max_restarts=1000)).run())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
