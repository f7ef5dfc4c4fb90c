import asyncio
import os
import signal

import pytest

from dsv3.api.templates.messages import Render
from dsv3.api.templates.pool import TemplatePool, TemplateTooSlow
from dsv3.text.chat_template import TemplateError

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% elif messages[0].content == 'grow' %}"
    "{% set ns = namespace(x='x' * 99999) %}{% for a in range(30) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    "{% else %}{{ bos_token }}{{ messages[0].content }}{% endif %}"
)


def ask(content, tools=None):
    return Render([{"role": "user", "content": content}], tools, True, False, {})


def with_pool(work, template=TEMPLATE, deadline_s=5.0):
    """Runs `work(pool)` on an event loop of its own."""

    async def run():
        pool = TemplatePool(template, {"bos_token": "<s>"}, deadline_s)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_many_at_once():
    async def work(pool):
        sizes = [1, 100_000] * 10
        return sizes, await asyncio.gather(*(pool.render(ask(f"{i}" * size)) for i, size in enumerate(sizes)))

    sizes, prompts = with_pool(work)
    assert prompts == ["<s>" + f"{i}" * size for i, size in enumerate(sizes)]


def test_a_late_worker_is_killed_and_replaced():
    async def work(pool):
        with pytest.raises(TemplateTooSlow):
            await pool.render(ask("loop"))
        return await pool.render(ask("fine"))

    assert with_pool(work, deadline_s=0.5) == "<s>fine"


def test_a_slow_large_conversation_delays_no_small_one():
    """The large one is late; small ones are answered while it runs."""
    slow = "{% if messages[0].content[0] == 'l' %}" + LOOP + "{% endif %}{{ messages[0].content }}"

    async def work(pool):
        await pool.check()
        large = asyncio.create_task(pool.render(ask("l" * 100_000)))
        answered = 0
        while not large.done():
            assert await pool.render(ask("s")) == "s"
            answered += 1
        with pytest.raises(TemplateTooSlow):
            await large
        return answered

    assert with_pool(work, slow, deadline_s=1.0) > 1


def test_a_client_that_goes_away_leaves_no_answer_for_the_next():
    async def work(pool):
        await pool.render(ask("first"))
        gone = asyncio.create_task(pool.render(ask("loop")))
        await asyncio.sleep(0.1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await pool.render(ask("next"))

    assert with_pool(work) == "<s>next"


def test_a_worker_that_dies_is_replaced():
    async def work(pool):
        await pool.check()
        os.kill(pool._small._process.pid, signal.SIGKILL)
        for _ in range(3):  # it may be noticed while asking
            try:
                return await pool.render(ask("again"))
            except TemplateError:
                continue

    assert with_pool(work) == "<s>again"


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
