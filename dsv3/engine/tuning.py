"""The file of `launch.tune`: what was measured to be faster on this machine, for a model and a version of the code.

It changes how fast an engine is, and the rounding of sums, never what a request may ask for. So a file that is not for
this device, model and version, or cannot be read, is ignored with a warning: a server that is upgraded starts, with the
defaults.
"""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from dsv3.config.options import EngineOptions
from dsv3.engine.device.driver import started_devices
from dsv3.engine.fingerprint import Fields, environment
from dsv3.engine.stored import machine_fields
from dsv3.files import replace_file
from pallas_kernels.tuned import set_plans

_log = logging.getLogger(__name__)
TUNED = ("decode_batch_sizes", "prefill_batch_sizes", "max_num_batched_tokens", "speculative_config")
"""The options that a file may have values for."""
_MOST_BYTES = 1 << 24
_NUMBERS = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file.

    `made_for` are the fields of device, model and version, `options` values of `TUNED`, `plans` the table of
    `pallas_kernels.tuned.set_plans`. `measured` has a row per choice, for readers.
    """

    made_for: Fields
    options: dict[str, Any]
    plans: dict[str, str]
    measured: list[dict[str, Any]] = []


def made_for(model_dir: Path) -> Fields:
    """Returns the fields of this process's device, this version and a model. Raises ValueError where jax fails."""
    fields = environment(model_dir) | {"device": started_devices()[0].device_kind}
    machine = machine_fields()
    if "processor" in machine:
        fields |= {"processor": machine["processor"], "cores": str(os.cpu_count())}
    return fields


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Writes a file in one step. Raises OSError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n")


def apply_tuning(options: EngineOptions, model_dir: Path) -> EngineOptions:
    """Sets the plans of this process to those of `options.tuning`; returns the options with what the file adds.

    Options that were given stay. Without a file, or with one that is ignored, there are no measured plans.
    """
    plans: dict[str, str] = {}
    if options.tuning is not None:
        try:
            tuning = _read(Path(options.tuning), made_for(model_dir))
            added = _added(options, tuning.options)
            options, plans = dataclasses.replace(options, **added), tuning.plans
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("tuning: %s is ignored: %s; python -m launch.tune writes another", options.tuning, error)
        else:
            named = ", ".join(f"{name} {value}" for name, value in added.items()) or "no option"
            used = "not used, because of batch_invariant" if options.batch_invariant else "used"
            _log.info("tuning: %s sets %s; its %d plans of kernels are %s", options.tuning, named, len(plans), used)
    set_plans(plans)
    return options


def _read(path: Path, here: Fields) -> Tuning:
    """Returns the content of a file for this machine; raises OSError or ValueError."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    tuning = msgspec.json.decode(content, type=Tuning)  # raises a ValueError
    names = sorted(here.keys() | tuning.made_for.keys())
    wrong = [name for name in names if here.get(name) != tuning.made_for.get(name)]
    if wrong:
        each = (f"{name} {tuning.made_for.get(name, 'none')} (here {here.get(name, 'none')})" for name in wrong)
        raise ValueError(f"it was made for {', '.join(each)}")
    return tuning


def _added(options: EngineOptions, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a file for options that were not given. Raises ValueError for other names, and values."""
    if unknown := sorted(found.keys() - {*TUNED}):
        raise ValueError(f"it sets {', '.join(unknown)}, which is not one of {', '.join(TUNED)}")
    dataclasses.replace(EngineOptions(), **found)  # raises for values that no engine takes
    added = {name: value for name, value in found.items() if getattr(options, name) is None}
    added.pop("speculative_config", None)  # drafts are made where they are asked for
    given, drafts = options.speculative_config, found.get("speculative_config")
    if given and drafts and given.get("method") == drafts.get("method") and not any(n in given for n in _NUMBERS):
        added["speculative_config"] = {**given, **{name: drafts[name] for name in _NUMBERS if name in drafts}}
    return added
