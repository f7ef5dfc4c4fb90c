"""A command's place among several processes: what its flags say, and what Slurm tells in their place."""

from collections.abc import Mapping

from absl import flags as absl_flags

from dsv3.config.options import ClusterOptions
from dsv3.engine.cluster.membership import slurm_membership
from dsv3.processes.key_file import key_path, read_key
from launch import cli, flags


def cluster_options(environ: Mapping[str, str]) -> ClusterOptions | None:
    """Returns this process's place among several, None for a single process; `environ` fills in for missing flags.

    Raises UsageError for settings that are missing or wrong, and for a key file that cannot be used.
    """
    given = cli.given(ClusterOptions)
    try:
        told = slurm_membership(environ)
    except ValueError as error:
        raise flags.UsageError(str(error)) from None
    values = absl_flags.FLAGS
    place = {name: value if values[name].using_default_value else given[name] for name, value in told.items()}
    per_node = place.pop("processes_per_node")
    per_node = 1 if per_node is None else per_node
    if per_node == 1 and (place["num_processes"] == 1 or set(place.values()) == {None}):
        return None
    if None in place.values():
        raise flags.UsageError("several processes need --coordinator, --num_processes and --process_id")
    if given["cluster_key_file"] is None:
        raise flags.UsageError(
            "several processes need --cluster_key_file, the same file everywhere; make one with: "
            "(umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"
        )
    try:
        read_key(given["cluster_key_file"])
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None
    place |= {"processes_per_node": per_node, "cluster_key_file": key_path(given["cluster_key_file"])}
    return cli.make(ClusterOptions, given | place)
