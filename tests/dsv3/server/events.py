"""Parses server-sent events."""

import json


def events_of(answer):
    """The events of a streamed answer, each as its name (the `event` line, or None) and its JSON.

    OpenAI's first two APIs end with a line that is not JSON.
    """
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"event", "data"}
        found.append((fields.get("event"), json.loads(fields["data"])))
    return found
