"""Replays traffic through the real scheduler and routing policy, with step times from the plan. Needs no GPU.

  python -m launch.simulate --prefill=prefill_ep32 --decode=decode_ep144 --times=times.json \\
      --concurrency=13000 --seconds=600 --warm_up=200
  python -m launch.simulate --instances=node_8xh200 --times=times.json --trace=mooncake.jsonl --plot=day.svg
  python -m launch.simulate --instances=node_8xh200 --times=times.json --request_rate=20 --day --seconds=3600 --scale

Deployments are named as for launch.plan. The first run compiles for minutes, and saves the step times in --times.
docs/simulate.md lists what is real in a simulation and what is modelled.
"""

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags as absl_flags

from launch import catalog, cli, flags
from tools.simulate.options import SimulateOptions

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig
    from tools.plan.deployment import Deployment
    from tools.simulate.times import InstanceTimes

cli.define(SimulateOptions)
_MODEL = absl_flags.DEFINE_string(
    "model", "deepseek_v3", f"Serve this model: {', '.join(catalog.MODELS)}, or a Hugging Face directory."
)
_JSON = absl_flags.DEFINE_string("json", None, "Write all figures to this file as JSON.")
_PLOT = absl_flags.DEFINE_string("plot", None, "Draw nodes, rates and waits over time to this SVG or PNG file.")


def main() -> int:
    """Runs a simulation and prints its figures."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax starts: leave present GPUs alone
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    options = cli.read(SimulateOptions)
    flags.check_outputs(_JSON.value, _PLOT.value, (".svg", ".png"))
    from rich.console import Console

    from tools.simulate import report
    from tools.simulate.fleet import FleetConfigError
    from tools.simulate.simulation import simulate
    from tools.simulate.times import TimesError
    from tools.simulate.traffic import TrafficError

    try:
        by_name = _times(options, catalog.model(_MODEL.value))
        gc.freeze()
        gc.disable()  # ended requests leave no cycles, and there are millions of other objects
        figures, snapshots, record = simulate(options, by_name)
    except (FleetConfigError, TimesError, TrafficError) as error:
        raise flags.UsageError(str(error)) from error
    Console().print(report.render(figures))
    flags.write_json(_JSON.value, figures)
    if _PLOT.value:
        report.draw(snapshots, record, Path(_PLOT.value))
    return 0


def _times(options: SimulateOptions, model: "ModelConfig") -> "dict[str, InstanceTimes]":
    """Returns the deployments' step times: from the file, or else compiled and added to it."""
    from tools.simulate.from_plan import times_digest
    from tools.simulate.times import read_times, write_times

    path = None if options.times is None else Path(options.times)
    if path is not None and not path.absolute().parent.is_dir():
        raise flags.UsageError(f"--times {path}: its directory does not exist")
    known = read_times(path) if path is not None and path.exists() else {}
    names = [name for name in (options.prefill, options.decode, options.instances) if name]
    for name in names:
        deployment = catalog.deployment(name)
        if name not in known or known[name].digest != times_digest(model, deployment):
            known[name] = _compiled(model, deployment)
            if path is not None:
                write_times(path, known)
    return {name: known[name] for name in names}


def _compiled(model: "ModelConfig", deployment: "Deployment") -> "InstanceTimes":
    from rich.console import Console

    from pallas_kernels.aot import AotUnavailableError
    from tools.plan.deployment import DeploymentError
    from tools.simulate.from_plan import compute_times

    try:
        with Console(stderr=True).status("") as status:
            return compute_times(model, deployment, status.update)
    except (DeploymentError, AotUnavailableError) as error:
        raise flags.UsageError(str(error)) from error


if __name__ == "__main__":
    flags.run(main)
