"""What sending a step to the followers costs the leader's engine thread.

  python -m benchmarks.cluster_send [--ranks 144] [--rows 128] [--followers 17] [--steps 300]

Followers are played by threads of another process. The decode command is the published EP144 deployment's: each rank
decodes 128 requests. The prefill command has 16 chunks of 4,096 tokens, for the follower that gets most of its bytes.
Sender threads, which encrypt the frames, work meanwhile; processor time is that of the engine's thread alone.
"""

import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.instances import free_port, key_file
from benchmarks.record import Report, arguments, run
from dsv3.config.engine import EngineConfig
from dsv3.config.options import ClusterOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.messages import Begin, Heartbeat, Hello, Stop
from dsv3.engine.cluster.wire import connect
from dsv3.engine.device.state import NUM_FIELDS
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.files import read_key
from dsv3.processes.certificates import credentials_of


def follow(cluster: ClusterOptions) -> None:
    """Plays every follower; ends with the leader."""
    threads = [
        threading.Thread(target=_follow_one, args=(cluster, process_id))
        for process_id in range(1, cluster.num_processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _follow_one(cluster: ClusterOptions, process_id: int) -> None:
    connection = socket.create_connection(cluster.control_address)
    wire = connect(connection, credentials_of(read_key(cluster.cluster_key_file)), process_id)
    wire.send(messages.encode(Hello({}, "here", 1)))
    while (body := wire.receive()) is not None:
        message = messages.decode_for_follower(body)
        if isinstance(message, Stop):
            return
        if isinstance(message, Begin):
            wire.send(messages.encode(Heartbeat()))


def _command(number: int, rows: np.ndarray) -> StepCommand:
    return StepCommand(number, (("decode", DecodeCommand(rows, 1)),))


def _prefill(ranks: int) -> PrefillCommand:
    """Chunks of 4,096 tokens with their 64 pages, spread over the ranks as evenly as the scheduler does."""
    header = np.array([[i * ranks // 16, 64, 0, 4096, 0, 1, *[0] * NUM_FIELDS] for i in range(16)], np.int32)
    return PrefillCommand(4096, header, np.full(16 * 4096, 10**5, np.int32), np.zeros(16 * 64, np.int32), True)


def main(report: Report) -> None:
    given = arguments(__doc__, ranks=144, rows=128, followers=17, steps=300)
    cluster = ClusterOptions(
        coordinator=f"127.0.0.1:{free_port()}",
        num_processes=given.followers + 1,
        process_id=0,
        cluster_key_file=str(key_file(Path(tempfile.mkdtemp()))),
        cluster_silence_timeout=1e9,
    )
    leader = Leader(cluster, {}, print, print)
    followers = multiprocessing.get_context("spawn").Process(target=follow, args=(cluster,))
    followers.start()
    leader.wait_for_followers()
    limits = EngineConfig(64, 1, num_ranks=given.ranks, num_processes=given.followers + 1)
    leader.send_limits(limits)
    rows = np.zeros((given.ranks, given.rows, 3), np.int32)
    times, processor = [], []
    for number in range(given.steps):
        time.sleep(0.02)  # a step of the device
        started, started_processor = time.perf_counter(), time.thread_time()
        leader.send(_command(number, rows))
        times.append(time.perf_counter() - started)
        processor.append(time.thread_time() - started_processor)
    leader.end()
    followers.join()
    size = len(messages.encode(messages.step_of(_command(0, rows).part(limits.ranks_of(1)))))
    prefill = _prefill(given.ranks)
    parts = [prefill.part(limits.ranks_of(process)) for process in range(1, given.followers + 1)]
    largest = max(len(messages.encode(messages.step_of(StepCommand(0, (("prefill", p),))))) for p in parts)
    rows_of_table = [
        ["a decode command, bytes to each", size],
        ["a prefill command, bytes to a follower at most", largest],
        ["sending a decode command, median (us)", statistics.median(times) * 1e6],
        ["processor time of that (us)", statistics.median(processor) * 1e6],
    ]
    title = f"{given.ranks} ranks of {given.rows} rows, {given.followers} followers"
    report.table(title, ["what", "result"], rows_of_table)


if __name__ == "__main__":
    run(main)
