"""Asks a small model that `launch.train` made 20 fixed questions.

    JAX_PLATFORMS=cpu python -m benchmarks.bundled_answers [--model DIR]

Each question is answered greedily, alone. An answer is right if it is complete and the question's pattern occurs in it.
The pattern asks for what the answer must say; one that also says something wrong may match, so read them. The table is
that of the model's card.
"""

import re
from pathlib import Path

from benchmarks.record import Report, arguments, run
from dsv3 import LLM, SamplingParams
from dsv3.engine.build import bundled_model

QUESTIONS: dict[str, str] = {
    "Hello": r"^Hello",
    "Who are you?": r"language model with the architecture of DeepSeek-V3",
    "What is Python?": r"programming language",
    "What does str.split do?": r"list of the (sub)?(strings|words)",
    "What does len do?": r"(number of items|length)",
    "What does json.dumps do?": r"Seriali[sz]e.*(JSON|str)",
    "What does os.path.join do?": r"[Jj]oin.*path",
    "What does math.sqrt do?": r"square root",
    "What does list.append do?": r"[Aa](ppend|dd).*end",
    "What does dict.get do?": r"value for.*key",
    "What does time.sleep do?": r"([Dd]elay|[Ss]uspend|[Ss]leep).*second",
    "What does re.sub do?": r"[Rr]eplac",
    "What does random.randint do?": r"random integer",
    "What does sorted do?": r"(new|sorted) (sorted )?list",
    "What is the random module for?": r"[Rr]andom (variable|number)",
    "How do I read a file?": r"open\(.*\n?.*read\(",
    "How do I sort a list?": r"sort(ed)?\(",
    "How do I raise an exception?": r"raise \w+",
    "Write a function that adds two numbers.": r"def \w+\((\w+), (\w+)\):\s+return (\1 \+ \2|\2 \+ \1)",
    "How can I loop over the items of a list?": r"for \w+ in \w+:",
}
"""Questions of the kind that the README shows, and what a right answer must contain. The last is not trained on."""
LONGEST = 96


def answers(directory: Path) -> dict[str, tuple[str, bool]]:
    """Returns the greedy answer to each question, and whether it is right."""
    llm = LLM(directory, max_model_len=256, max_num_seqs=4)
    found = {}
    for question, pattern in QUESTIONS.items():
        message = [{"role": "user", "content": question}]
        (output,) = llm.chat(message, SamplingParams(temperature=0.0, max_tokens=LONGEST))
        answer = output.outputs[0]
        right = answer.finish_reason == "stop" and re.search(pattern, answer.text, re.DOTALL) is not None
        found[question] = answer.text, right
    return found


def main(report: Report) -> None:
    directory = arguments(__doc__, model=bundled_model()).model
    found = answers(directory)
    rows = (
        [question, "`" + text.strip().replace("\n", "\\n").replace("|", "\\|") + "`", "right" if right else "wrong"]
        for question, (text, right) in found.items()
    )
    title = f"{sum(right for _, right in found.values())} of {len(found)} answers are right"
    report.table(title, ["question", "greedy answer", "verdict"], rows)


if __name__ == "__main__":
    run(main)
