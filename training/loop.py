"""The training loop: steps, validation, reports, checkpoints, and a clean stop on SIGTERM.

A run writes a log of JSON lines, a picture of the loss, and the model as a Hugging Face directory.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsv3.checkpoint import save_hf
from dsv3.model.params import abstract
from sharding import processes
from training import data as training_data
from training.config import TrainingConfig
from training.data import Data, held_out_batches
from training.step import SavedState, TrainState, by_layer, compute_copy, evaluate, initial_state, stacked, train_step
from training.tokenizer import BOS_ID, EOS_ID, tokenizer_config

MAX_TO_KEEP = 2
"""Checkpoints that are kept on disk."""


class Checkpoints:
    """The checkpoints of one run under `directory`; a context manager whose end waits for pending writes.

    With several processes each creates one, in a shared directory, and all call its methods together.
    """

    def __init__(self, directory: Path, config: TrainingConfig):
        self._config = config
        options = ocp.CheckpointManagerOptions(max_to_keep=MAX_TO_KEEP, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Returns the number of steps of the newest checkpoint; None without checkpoints."""
        return self._manager.latest_step()

    def save(self, step: int, state: SavedState) -> None:
        """Starts to write `state` after `step` steps, unless that step is already saved.

        Waits for the previous save. The caller may overwrite the arrays as soon as this returns.
        """
        if step != self.latest_step():
            model = ocp.args.JsonSave(dataclasses.asdict(self._config.model))
            self._manager.save(step, args=ocp.args.Composite(layers=ocp.args.StandardSave(state), model=model))

    def wait(self) -> None:
        """Waits until all saved states are written."""
        self._manager.wait_until_finished()

    def restore(self, shapes: SavedState) -> tuple[int, SavedState]:
        """Returns the newest checkpoint's step and state, bit for bit, with the shardings of `shapes`.

        `shapes` has a `jax.ShapeDtypeStruct` for every array. Raises FileNotFoundError without a checkpoint, ValueError
        if it belongs to another model or was written by an older version.
        """
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}; start without --resume")
        self._check_model(step)
        if not (self._manager.directory / str(step) / "layers").exists():
            raise ValueError(
                f"checkpoint {step} in {self._manager.directory} has no layers: it was written by an older version"
            )
        parts = self._manager.restore(step, args=ocp.args.Composite(layers=ocp.args.StandardRestore(shapes)))
        return step, parts.layers

    def _check_model(self, step: int) -> None:
        saved = self._manager.restore(step, args=ocp.args.Composite(model=ocp.args.JsonRestore())).model
        wanted = json.loads(json.dumps(dataclasses.asdict(self._config.model)))  # tuples are lists in the checkpoint
        different = [k for k, v in wanted.items() if saved.get(k) != v]
        if different:
            changes = ", ".join(f"{k} was {saved.get(k)}, is {wanted[k]}" for k in different)
            raise ValueError(f"the checkpoint belongs to another model: {changes}; use another --output")


REPORT_EVERY = 10
"""Steps between two lines of the log, and two updates of the progress bar."""


class Trainer(Protocol):
    """Runs the steps of training and owns the placement of the state."""

    def place(self, state: TrainState) -> Any:
        """Returns the trainer's form of `state`, which it may overwrite."""
        ...

    def step(self, state: Any, tokens: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Trains on `tokens`, int32 [B, S]; returns the next state and the scalars to report."""
        ...

    def on_one_device(self, state: Any) -> TrainState:
        """Returns the state on one device, for validation and export."""
        ...

    def saved_state(self, state: Any) -> SavedState:
        """Returns the state in the form of checkpoints, on its devices."""
        ...

    def shapes(self) -> SavedState:
        """Returns the `jax.ShapeDtypeStruct`s with shardings with which to restore a saved state."""
        ...

    def restore_state(self, saved: SavedState, step: int) -> Any:
        """Returns the trainer's state after `step` steps from a saved one with the shardings of `shapes`."""
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Trains on the default device."""

    config: TrainingConfig

    def place(self, state: TrainState) -> TrainState:
        return state

    def step(self, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        return train_step(state, tokens, config=self.config)

    def on_one_device(self, state: TrainState) -> TrainState:
        return state

    def saved_state(self, state: TrainState) -> SavedState:
        return by_layer(state, cfg=self.config.model)

    def shapes(self) -> SavedState:
        shapes = jax.eval_shape(lambda: by_layer(initial_state(self.config), cfg=self.config.model))
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), shapes)

    def restore_state(self, saved: SavedState, step: int) -> TrainState:
        return jax.device_put(stacked(jax.device_get(saved), self.config.model, step))


def train(
    config: TrainingConfig, output: Path, *, resume: bool, console: Console, trainer: Trainer | None = None
) -> TrainState:
    """Trains in directory `output` until `config.steps` or SIGTERM, saves the state and returns it.

    `trainer` runs the steps, by default on one device. A run may be resumed with another one.

    Raises:
      FileExistsError: `output` holds checkpoints and `resume` is false.
      FileNotFoundError: `resume` is true and there is no checkpoint.
      ValueError: the checkpoint, or the data beside it, belongs to another model.
    """
    if resume and not (output / "checkpoints").is_dir():
        raise FileNotFoundError(f"no checkpoint in {output}; start without --resume")
    data = processes.first_process_first(lambda: training_data.prepare(output / "data", config))
    with Checkpoints(output / "checkpoints", config) as checkpoints:
        if not resume and checkpoints.latest_step() is not None:
            raise FileExistsError(f"{output} holds a run; continue it with --resume or give another --output")
        trainer = trainer or OneDevice(config)
        done, state = _initial_state(config, checkpoints, trainer, resume)
        console.print(f"{done} of {config.steps} steps done, {_num_parameters(config):,} parameters, {output}")
        log = output / "log.jsonl"
        if is_first := jax.process_index() == 0:
            _cut_log(log, done)
        run = _TrainingRun(config, trainer, data, checkpoints, log if is_first else None, console)
        run.seconds = _seconds_before(log)
        with stop_signal() as stopped:
            return run.steps(done, state, stopped)


def _initial_state(config: TrainingConfig, checkpoints: Checkpoints, trainer: Trainer, resume: bool) -> tuple[int, Any]:
    """Returns the steps done and the trainer's state."""
    if not resume:
        return 0, trainer.place(initial_state(config))
    done, saved = checkpoints.restore(trainer.shapes())
    return done, trainer.restore_state(saved, done)


class _TrainingRun:
    """The loop of one process. `seconds` is the time in training steps, including those before a resume."""

    def __init__(
        self,
        config: TrainingConfig,
        trainer: Trainer,
        data: Data,
        checkpoints: Checkpoints,
        log: Path | None,
        console: Console,
    ) -> None:
        self.config, self.trainer = config, trainer
        self.data, self.checkpoints, self.log, self.console = data, checkpoints, log, console
        self.seconds = 0.0
        self._validation = training_data.held_out_batches(data, config, config.eval_batches)

    def steps(self, first: int, state: Any, stopped: list[int]) -> TrainState:
        """Goes on from step `first` to the last step or a signal; returns the state that was saved then."""
        config, tokens_per_step = self.config, self.config.batch_size * self.config.sequence_length
        with _progress(self.console) as progress:
            task = progress.add_task("train", total=config.steps, completed=first, text="")
            since, window = time.perf_counter(), 0
            for step in range(first, config.steps):
                state, metrics = self.trainer.step(state, training_data.batch(self.data, config, step))
                metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
                done, window = step + 1, window + 1
                if done % REPORT_EVERY == 0:
                    elapsed = time.perf_counter() - since
                    speed = window * tokens_per_step / elapsed
                    self.seconds += elapsed
                    self._report("train", done, metrics | {"tokens_per_second": speed})
                    text = f"loss {metrics['loss']:.3f}  mtp {metrics['mtp_loss']:.3f}  {speed:,.0f} tokens/s"
                    progress.update(task, completed=done, text=text)
                    since, window = time.perf_counter(), 0
                if done % config.eval_every == 0:
                    self._validate(self.trainer.on_one_device(state), done, progress.tasks[task].fields["text"])
                stop = processes.any_of(bool(stopped))
                if done % config.checkpoint_every == 0 or done == config.steps or stop:
                    self.checkpoints.save(done, self.trainer.saved_state(state))
                if stop:
                    number = f"signal {stopped[0]}" if stopped else "a signal to another process"
                    self.console.print(f"stopped by {number} after step {done}; continue with --resume")
                    break
        return self.trainer.on_one_device(state)

    def _validate(self, state: TrainState, done: int, text: str) -> None:
        metrics = mean_metrics(state, self._validation, self.config)
        self._report("validation", done, metrics)
        values = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self.console.print(f"step {done}: {text}  |  validation: {values}", highlight=False, soft_wrap=True)

    def _report(self, kind: str, done: int, metrics: dict[str, float]) -> None:
        tokens = done * self.config.batch_size * self.config.sequence_length
        if self.log is not None:
            values = {"kind": kind, "step": done, "tokens": tokens, "seconds": round(self.seconds, 1)} | metrics
            with self.log.open("a") as file:
                file.write(json.dumps(values) + "\n")


def mean_metrics(state: TrainState, batches: list[np.ndarray], config: TrainingConfig) -> dict[str, float]:
    """Returns the means of `evaluate` over `batches`, which all have one shape."""
    results = [jax.device_get(evaluate(state.params, tokens, config=config)) for tokens in batches]
    return {name: float(np.mean([r[name] for r in results])) for name in results[0]}


@contextlib.contextmanager
def stop_signal() -> Iterator[list[int]]:
    """Yields a list that receives the first SIGTERM or SIGINT; a second one has its usual effect."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    return Progress(*columns, console=console, speed_estimate_period=300)


def _num_parameters(config: TrainingConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config.model, np.float32)))


def _cut_log(log: Path, step: int) -> None:
    """Drops the lines after the step from which a run resumes."""
    kept = [row for row in read_log(log) if row["step"] <= step]
    new = log.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in kept))
    new.replace(log)


def _seconds_before(log: Path) -> float:
    rows = read_log(log)
    return rows[-1]["seconds"] if rows else 0.0


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log, without an incomplete last one; returns none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def plot_losses(log: Path, picture: Path) -> bool:
    """Draws training, MTP and validation loss over tokens seen as a PNG; returns False if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    rows = read_log(log)
    figure = Figure(figsize=(6.4, 3.6), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    for kind, key, label in (
        ("train", "mtp_loss", "MTP (token after next)"),
        ("train", "loss", "training"),
        ("validation", "loss", "validation"),
    ):
        chosen = [row for row in rows if row["kind"] == kind]
        style = "o-" if kind == "validation" else "-"
        axes.plot([r["tokens"] / 1e6 for r in chosen], [r[key] for r in chosen], style, ms=2.5, lw=1, label=label)
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
    return True


def export(directory: Path, state: TrainState, config: TrainingConfig, data: Path) -> None:
    """Writes config.json, model.safetensors (bfloat16, the router float32), tokenizer and generation settings.

    Raises FileExistsError if `directory` is not empty.
    """
    save_hf(directory, config.model, compute_copy(state.params, config.model, jnp.bfloat16))
    shutil.copyfile(data / "tokenizer.json", directory / "tokenizer.json")
    _write_json(directory / "tokenizer_config.json", tokenizer_config(config.model.max_position_embeddings))
    settings = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    _write_json(directory / "generation_config.json", settings)


def final_figures(state: TrainState, data: Data, config: TrainingConfig) -> dict[str, Any]:
    """Measures the losses over all held-out text (nats per token, bits per byte) and the acceptance of MTP drafts."""
    metrics = mean_metrics(state, held_out_batches(data, config), config)
    tokens_per_byte = len(data.held_out) / data.held_out_bytes
    return metrics | {"bits_per_byte": metrics["loss"] * tokens_per_byte / math.log(2)}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
