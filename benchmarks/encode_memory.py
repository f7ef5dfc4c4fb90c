"""Memory and processor time that encoding one text takes, in a fresh process.

python -m benchmarks.encode_memory words 6.3        6.3 MiB of words; also "code" and "spaces"
"""

import resource
import sys
import time
from pathlib import Path

import dsv3
from dsv3.text.tokenizer import Tokenizer


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(kind: str, mib: float) -> None:
    [file] = (Path(dsv3.__file__).parent / "bundled").rglob("tokenizer.json")
    tokenizer = Tokenizer.from_directory(file.parent)
    part = {"words": "hello world this is text ", "code": Path(__file__).read_text(), "spaces": " "}[kind]
    length = int(mib * 2**20)
    text = (part * (length // len(part) + 1))[:length]
    before, began = peak_bytes(), time.process_time()
    ids = tokenizer.encode(text)
    seconds, memory = time.process_time() - began, peak_bytes() - before
    print(f"{len(ids)} tokens, {memory / length:.0f} bytes per byte, {seconds:.1f} s of processor time")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
