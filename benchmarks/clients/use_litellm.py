"""LiteLLM, as a client of all three APIs."""

import litellm

from benchmarks.clients.checking import MODEL, Servers, expect, main

litellm.telemetry = False
QUESTION = [{"role": "user", "content": "What is a list?"}]


def chat(servers: Servers) -> str:
    """openai/: chat, whole and streamed"""
    return both(f"openai/{MODEL}", f"{servers.url}/v1")


def messages(servers: Servers) -> str:
    """anthropic/: messages, whole and streamed"""
    return both(f"anthropic/{MODEL}", servers.url)


def both(model: str, url: str) -> str:
    """Returns the beginning of a text; its stream must join to it."""
    settings = {"model": model, "api_base": url, "api_key": "none", "messages": QUESTION}
    whole = litellm.completion(**settings, max_tokens=12, temperature=0).choices[0].message.content
    parts = litellm.completion(**settings, max_tokens=12, temperature=0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    expect(text == whole, (text, whole))
    return repr(text[:40])


def responses(servers: Servers) -> str:
    """openai/: responses"""
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{servers.url}/v1", api_key="none", input="Hello", max_output_tokens=5
    )
    expect(answer.status == "incomplete", answer)  # LiteLLM asks for 16 tokens at least
    return f"{answer.status}, {answer.usage.total_tokens} tokens"


if __name__ == "__main__":
    main([chat, messages, responses])
