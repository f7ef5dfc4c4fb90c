import asyncio
import os
import signal

import psutil
import pytest

from dsv3.server.limits import WorkersBusy
from dsv3.server.templates import Render, TemplatePool
from dsv3.server.worker_process import PoisonRequest, WorkerProcess
from dsv3.text.chat_template import TemplateError
from tests.dsv3.server import serving

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% for a in range(100) %}{% for b in range(9999) %}{% endfor %}{% endfor %}slow"  # 40 ms on a quiet machine
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% elif messages[0].content == 'slow' %}" + SLOW + ""
    "{% elif messages[0].content == 'surrogate' %}{{ '\\ud800' }}{% elif messages[0].content == 'grow' %}"
    "{% set ns = namespace(x='x' * 99999) %}{% for a in range(30) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    "{% else %}{{ bos_token }}{{ messages[0].content }}{% endif %}"
)


def ask(content, tools=None):
    return Render([{"role": "user", "content": content}], tools, True, False, {})


def with_pool(work, template=TEMPLATE, deadline_s=5.0, **settings):
    """Runs `work(pool)` on an event loop of its own."""

    async def run():
        pool = TemplatePool(template, {"bos_token": "<s>"}, deadline_s, **settings)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def workers():
    """The process ids of the workers."""
    return {child.pid for child in psutil.Process().children() if "dsv3.server.templates" in serving.command_of(child)}


def kill_workers():
    for pid in workers():
        os.kill(pid, signal.SIGKILL)


def test_many_concurrent_conversations():
    async def work(pool):
        sizes = [1, 100_000] * 10
        return sizes, await asyncio.gather(*(pool.render(ask(f"{i}" * size)) for i, size in enumerate(sizes)))

    sizes, prompts = with_pool(work)
    assert prompts == ["<s>" + f"{i}" * size for i, size in enumerate(sizes)]


def test_a_worker_past_its_deadline_is_killed_and_replaced():
    async def work(pool):
        with pytest.raises(TemplateError, match="took longer than"):
            await pool.render(ask("loop"))
        return await pool.render(ask("fine"))

    assert with_pool(work, deadline_s=0.5) == "<s>fine"


def test_a_slow_large_conversation_does_not_delay_small_ones():
    """The large one times out; small ones are rendered meanwhile."""
    slow = "{% if messages[0].content[0] == 'l' %}" + LOOP + "{% endif %}{{ messages[0].content }}"

    async def work(pool):
        await pool.check()
        large = asyncio.create_task(pool.render(ask("l" * 100_000)))
        answered = 0
        while not large.done():
            assert await pool.render(ask("s")) == "s"
            answered += 1
        with pytest.raises(TemplateError, match="took longer than"):
            await large
        return answered

    assert with_pool(work, slow, deadline_s=1.0) > 1


def test_a_response_to_a_disconnected_client_is_not_given_to_the_next():
    async def work(pool):
        await pool.render(ask("first"))
        gone = asyncio.create_task(pool.render(ask("loop")))
        await asyncio.sleep(0.1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await pool.render(ask("next"))

    assert with_pool(work, deadline_s=1.0) == "<s>next"


def test_disconnects_do_not_kill_workers():
    """A rendering that has started finishes; one in the queue never starts."""

    async def work(pool):
        await pool.check()
        before = workers()
        for _ in range(3):
            gone = [asyncio.create_task(pool.render(ask(content))) for content in ("slow", "loop", "loop")]
            await asyncio.sleep(0.01)
            for task in gone:
                task.cancel()
        assert await pool.render(ask("next")) == "<s>next"
        return before, workers()

    before, after = with_pool(work)
    assert len(before) == 1 and after == before


def test_a_conversation_survives_the_death_of_a_worker():
    async def work(pool):
        await pool.check()
        kill_workers()
        assert await pool.render(ask("again")) == "<s>again"
        slow = asyncio.create_task(pool.render(ask("slow")))
        await asyncio.sleep(0.01)
        kill_workers()
        return await slow

    assert with_pool(work) == "slow"


def test_messages_that_crash_two_workers_are_an_error(monkeypatch):
    async def dies(self, frame):
        raise PoisonRequest

    async def work(pool):
        with monkeypatch.context() as patch, pytest.raises(TemplateError, match="crashed two worker processes"):
            patch.setattr(WorkerProcess, "call", dies)
            await pool.render(ask("deadly"))
        return await pool.render(ask("fine"))

    assert with_pool(work) == "<s>fine"


def test_waiting_too_long_for_a_worker_raises_workers_busy():
    async def work(pool):
        await pool.check()
        slow = asyncio.create_task(pool.render(ask("loop")))
        await asyncio.sleep(0.01)
        with pytest.raises(WorkersBusy):
            await pool.render(ask("waits"))
        with pytest.raises(TemplateError, match="took longer than"):
            await slow

    with_pool(work, deadline_s=1.0, wait_s=0.05)


def test_a_prompt_larger_than_a_frame_is_an_error():
    async def work(pool):
        await pool.check()
        before = workers()
        with pytest.raises(TemplateError, match="UnicodeEncodeError"):
            await pool.render(ask("surrogate"))
        return before == workers()

    assert with_pool(work)


def test_memory_is_bounded():
    async def work(pool):
        with pytest.raises(TemplateError, match=r"memory|ended"):
            await pool.render(ask("grow"))
        return await pool.render(ask("fine"))

    assert with_pool(work, deadline_s=30.0) == "<s>fine"


def test_malformed_templates_and_values():
    async def check(pool):
        with pytest.raises(TemplateError, match="compile"):
            await pool.check()

    with_pool(check, "{% for")

    async def render(pool):
        with pytest.raises(TemplateError, match="tool"):
            await pool.render(ask("x", [{"big": 10**30}]))
        return await pool.render(ask("x", [{"small": 1}]))

    assert with_pool(render) == "<s>x"


def test_a_template_whose_markers_cannot_be_hidden_is_rejected_at_start():
    async def check(pool):
        await pool.check()
        return await pool.render(ask("<a>", tools=None))

    assert with_pool(check, "{{ bos_token }}<a>{{ messages[0].content }}", markers=("<s>", "<a>")) == (
        "\0\x000\0\0\x001\0<a>"
    )
    with pytest.raises(TemplateError, match="escape_special_tokens"):
        with_pool(check, "{{ '<' ~ 'a>' ~ messages[0].content }}", markers=("<s>", "<a>"))
