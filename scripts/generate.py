"""Takes the export of a quickstart run, asks it a question that it was not trained on, prints its answer.

    python scripts/generate.py runs/quickstart/export

Touches nothing. The model's answer stands beside the right one, which dsft's own rows tell.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dsft.data.builtin import QUICKSTART_HELDOUT, builtin_rows


def answer(export: Path, messages: list[dict[str, str]]) -> str:
    """The model's reply to `messages`, at most 40 tokens, greedily: the same at every call."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / "config.json").is_file():
        given = " ".join(arguments) or "nothing"
        print(
            f"error: {given} is not one folder with a config.json; give a run's export folder.",
            file=sys.stderr,
        )
        return 2
    *question, truth = builtin_rows(QUICKSTART_HELDOUT)[0]["messages"]
    for message in question:
        print(f"{message['role']}: {message['content']}")
    print(f"the exported model answers: {answer(Path(arguments[0]), question)}")
    print(f"(the rows say: {truth['content']})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
