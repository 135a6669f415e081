"""Runs onnxruntime-genai in its own environment, told over standard input what to decode.

Reads one JSON line a job: ``{"ids": [...], "new_tokens": n}``. Answers with one JSON line: the tokens and the seconds
from the first token to the last.
"""

from __future__ import annotations

import json
import sys
import time

import onnxruntime_genai as og


def main(folder: str, threads: int) -> None:
    config = og.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)
    print(json.dumps({"ready": og.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids, new = job["ids"], job["new_tokens"]
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + new, min_length=len(ids) + new, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(new - 1):
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        tokens = [int(t) for t in generator.get_sequence(0)[len(ids) :]]
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
