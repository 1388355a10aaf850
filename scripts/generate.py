"""Takes the export of a quickstart run, asks it questions that it was not trained on, prints its answers.

    python scripts/generate.py runs/quickstart/export

Touches nothing. Each answer stands beside the right one, which the model can know from other rows only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dsft.data.read.builtin import QUICKSTART_HELDOUT, builtin_rows

QUESTIONS = 2


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The model's reply to `messages`, at most 40 tokens, greedily: the same at every call."""
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
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments[0])
    model: Any = AutoModelForCausalLM.from_pretrained(arguments[0])
    print("the exported model answers:")
    for row in builtin_rows(QUICKSTART_HELDOUT)[:QUESTIONS]:
        *question, truth = row["messages"]
        asked = " / ".join(message["content"] for message in question)
        print(f"  {asked} → {answer(model, tokenizer, question)} (right: {truth['content']})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
