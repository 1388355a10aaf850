"""Tokenize texts and generate greedily with llama.cpp, in an environment that has llama-cpp-python.

python llama_worker.py MODEL.gguf ASKED.json
{"texts": [text, …], "prompt": [token, …], "new": N} -> {"tokens": [[token, …], …], "answer": [token, …]}
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from llama_cpp import Llama


def main(model: str, asked: str) -> None:
    words = json.loads(Path(asked).read_text())
    llama = Llama(model, n_ctx=256, n_threads=1, verbose=False)
    tokens = [llama.tokenize(text.encode(), special=True) for text in words["texts"]]
    answer = list(islice(llama.generate(words["prompt"], temp=0.0, repeat_penalty=1.0), words["new"]))
    print(json.dumps({"tokens": tokens, "answer": answer}))
    llama.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
