"""Checkpoints of a training run, written by Orbax: the whole state, and the model it belongs to.

A state is saved layer by layer, each array from the devices it lies on, and restored to the devices of whatever mesh
goes on. Saving copies the arrays to the host and returns; a thread writes them. A checkpoint gets its name once it is
whole, so a kill at any moment leaves those before it.
"""

import dataclasses
from pathlib import Path

import orbax.checkpoint as ocp

from training.config import TrainingConfig
from training.saved import SavedState

KEPT = 2
"""Checkpoints that stay on disk."""


class Checkpoints:
    """The checkpoints of one run below `directory`, a context manager; its end waits for pending writes.

    Over several processes all make one, in a directory that all see, and call its methods together.
    """

    def __init__(self, directory: Path, config: TrainingConfig):
        self._config = config
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Steps done in the newest checkpoint; None if there is no checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: SavedState) -> None:
        """Begins to write `state` after `step` steps, unless that step is there already.

        The caller may overwrite the arrays as soon as this returns. Waits for the save before this one.
        """
        if step != self.latest_step():
            model = ocp.args.JsonSave(dataclasses.asdict(self._config.model))
            self._manager.save(step, args=ocp.args.Composite(layers=ocp.args.StandardSave(state), model=model))

    def wait(self) -> None:
        """Waits until what has been saved is written."""
        self._manager.wait_until_finished()

    def restore(self, shapes: SavedState) -> tuple[int, SavedState]:
        """Returns the newest checkpoint's step and state, bit for bit, on the devices that `shapes` says.

        `shapes` has a `jax.ShapeDtypeStruct` with a sharding for every array.

        Raises FileNotFoundError if there is no checkpoint, ValueError if it belongs to another model, or was written
        before states were saved by layer.
        """
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}; start without --resume")
        self._check_model(step)
        if not (self._manager.directory / str(step) / "layers").exists():
            raise ValueError(f"checkpoint {step} in {self._manager.directory} has no layers: an older version wrote it")
        parts = self._manager.restore(step, args=ocp.args.Composite(layers=ocp.args.StandardRestore(shapes)))
        return step, parts.layers

    def _check_model(self, step: int) -> None:
        saved = self._manager.restore(step, args=ocp.args.Composite(model=ocp.args.JsonRestore())).model
        wanted = dataclasses.asdict(self._config.model)
        different = [k for k, v in wanted.items() if saved.get(k) != (list(v) if isinstance(v, tuple) else v)]
        if different:
            changes = ", ".join(f"{k} was {saved.get(k)}, is {wanted[k]}" for k in different)
            raise ValueError(f"the checkpoint belongs to another model: {changes}; use another --output")
