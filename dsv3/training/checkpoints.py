"""Checkpoints of a training run, written by Orbax: the whole state, and the model it belongs to."""

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from dsv3.training.config import TrainingConfig
from dsv3.training.step import TrainState, initial_state

KEPT = 2
"""Checkpoints that stay on disk. If a kill cuts the newest one off, the other is whole."""


class Checkpoints:
    """The checkpoints of one run below `directory`, a context manager; its end waits for pending writes."""

    def __init__(self, directory: Path, config: TrainingConfig):
        self._config = config
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Steps done in the newest checkpoint; None if there is no checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes `state` under its step, unless that step is there already."""
        step = int(state.step)
        if step != self.latest_step():
            parts = ocp.args.Composite(
                state=ocp.args.StandardSave(state), model=ocp.args.JsonSave(dataclasses.asdict(self._config.model))
            )
            self._manager.save(step, args=parts)

    def restore(self) -> TrainState:
        """Returns the newest state, bit for bit.

        Raises FileNotFoundError if there is no checkpoint, ValueError if it belongs to another model.
        """
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}; start without --resume")
        self._check_model(step)
        target = jax.eval_shape(lambda: initial_state(self._config))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), target)
        parts = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        return parts.state

    def _check_model(self, step: int) -> None:
        saved = self._manager.restore(step, args=ocp.args.Composite(model=ocp.args.JsonRestore())).model
        wanted = dataclasses.asdict(self._config.model)
        different = [k for k, v in wanted.items() if saved.get(k) != (list(v) if isinstance(v, tuple) else v)]
        if different:
            changes = ", ".join(f"{k} was {saved.get(k)}, is {wanted[k]}" for k in different)
            raise ValueError(f"the checkpoint belongs to another model: {changes}; use another --output")
