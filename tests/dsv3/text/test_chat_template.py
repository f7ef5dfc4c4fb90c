import pytest

from dsv3.text.chat_template import ChatTemplate, TemplateError
from tests.dsv3.text import tiny

TOKENS = {"bos_token": tiny.BOS, "eos_token": tiny.EOS}
TEMPLATE = ChatTemplate(tiny.CHAT_TEMPLATE, TOKENS)
USER = {"role": "user", "content": "Hi"}


def test_messages_become_a_prompt():
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "<think>x</think>Yo"}
    prompt = TEMPLATE.render([system, USER, answer, USER])
    assert prompt == f"{tiny.BOS}Be brief.<｜User｜>Hi<｜Assistant｜>Yo{tiny.EOS}<｜User｜>Hi<｜Assistant｜></think>"


def test_thinking_and_generation_prompt():
    assert TEMPLATE.render([USER], kwargs={"thinking": True}).endswith("<｜Assistant｜><think>")
    assert TEMPLATE.render([USER], add_generation_prompt=False).endswith("Hi")


@pytest.mark.parametrize("name", ["tokenize", "messages", "bos_token", "chat_template", "tools"])
def test_other_kwargs_are_refused(name):
    with pytest.raises(TemplateError, match="may be set"):
        TEMPLATE.render([USER], kwargs={name: True})


def test_continue_final_message():
    messages = [USER, {"role": "assistant", "content": "The answer "}]
    prompt = TEMPLATE.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"{tiny.BOS}<｜User｜>Hi<｜Assistant｜>The answer "
    with pytest.raises(TemplateError, match="assistant"):
        TEMPLATE.render([USER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateError, match="cannot be combined"):
        TEMPLATE.render(messages, continue_final_message=True)
    dropping = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(TemplateError, match="drops"):
        dropping.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_helpers_of_hugging_face_templates():
    template = ChatTemplate(
        "{% for t in tools %}{{ t | tojson }}{{ strftime_now('%Y')[:2] }}{% break %}{% endfor %}", {}
    )
    assert template.render([USER], tools=[{"name": "<é>"}, {}]) == '{"name": "<é>"}20'


@pytest.mark.parametrize("source", ["{% for", "{% break %}", "{{ " + "(" * 5_000, "{{ x | no_such_filter }}"])
def test_malformed_templates(source):
    with pytest.raises(TemplateError, match="compile"):
        ChatTemplate(source, {})


def test_refusals_of_the_template_reach_the_caller():
    with pytest.raises(TemplateError, match="unknown role robot"):
        TEMPLATE.render([{"role": "robot", "content": "x"}])


def test_messages_that_the_template_cannot_render():
    with pytest.raises(TemplateError, match="cannot render"):
        ChatTemplate("{{ 'a' + messages[0].content }}", {}).render([{"role": "user", "content": 5}])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{% for m in messages %}{{ 'a' + m.content }}{% endfor %}",
            r"cannot render messages\[2\] \(TypeError: .*NoneType",
        ),
        ("{% for m in messages %}{{ 'a' + m['content'] }}{% endfor %}", r"cannot render messages\[2\]"),
        ("{% for m in messages %}{{ m.get('content').strip() }}{% endfor %}", r"refuses messages\[2\]: .*strip"),
        (
            "{% for m in messages %}{{ raise_exception('no ' + m.role) if m.role == 'tool' }}{% endfor %}",
            r"refuses messages\[2\]: no tool",
        ),
        ("{{ raise_exception('never') }}", "refuses these messages: never"),
    ],
)
def test_errors_name_the_message(source, words):
    messages = [USER, USER, {"role": "tool", "content": None}, USER]
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source, {}).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([USER])
