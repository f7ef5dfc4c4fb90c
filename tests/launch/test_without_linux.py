"""The bundled model is loaded and served where nothing is that only Linux has, as on macOS."""

import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.launch.test_serve import PROMPT, ROOT, SMALL, complete, serving

HIDING = Path(__file__).parents[1] / "without_linux"
SCRIPT = f"""
import os

assert not hasattr(os, "O_DIRECT") and not os.path.exists("/proc/self/maps"), "nothing is hidden"

from dsv3 import LLM, SamplingParams
from dsv3.kv_cache.tiers.host_pool import SharedMemory
from dsv3.processes.certificates import credentials_of, tls_context

llm = LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, progress=False)
print(llm.generate({PROMPT!r}, SamplingParams(max_tokens=20, temperature=0))[0].outputs[0].text, end="")
for is_server in (False, True):
    tls_context(credentials_of(b"k" * 32), is_server)
memory = SharedMemory("model", 3 * 2**20 + 5)
memory.array[:2] = 1, 2
assert memory.array.size == 3 * 2**20 + 5 and not memory.array[2:].any()
memory.close()
assert SharedMemory("model", 3 * 2**20 + 5).array[:3].tolist() == [1, 2, 0], "it is found again"
memory.path.unlink()
"""


@pytest.fixture
def hidden(tmp_path, monkeypatch):
    """The environment of processes from which Linux is hidden; returns the directory of their temporary files."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HIDING), os.environ.get("PYTHONPATH", str(ROOT)))))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_bundled_model_generates_and_is_served(hidden):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(hidden.iterdir()), "files of certificates go with the process"
    with serving(*SMALL, "--kv_offloading_size=0.02") as (_, lines):
        url = re.search(r"ready at (http://\S+)", "\n".join(lines))[1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            assert complete(client, PROMPT) == done.stdout
            chat = client.chat.completions.create(
                model="dsv3-tiny",
                messages=[{"role": "user", "content": "What does len do?"}],
                max_tokens=20,
                extra_body={"structured_outputs": {"regex": "[a-c]{5}"}},
            )
    assert re.fullmatch("[a-c]{5}", chat.choices[0].message.content)
