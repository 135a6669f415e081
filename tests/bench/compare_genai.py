"""Plain decoding beside onnxruntime-genai: the same prompts, in turn, on the same threads; medians of ratios.

    python tests/bench/compare_genai.py BUNDLE GENAI_PYTHON GENAI_FOLDER --precision int4

GENAI_FOLDER is what genai_build.py made for the precision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import kvrelay
from kvrelay.cli.bench import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("genai_python")
    parser.add_argument("genai_folder")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    worker = Path(__file__).with_name("genai_worker.py")
    genai = subprocess.Popen(
        [args.genai_python, str(worker), args.genai_folder, str(args.threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert genai.stdin is not None
    assert genai.stdout is not None
    version = json.loads(genai.stdout.readline())["ready"]
    pipe = kvrelay.Pipeline(args.bundle, draft="none", exact=False, precision=args.precision, threads=args.threads)
    ratios: dict[str, list[float]] = {}
    speeds: dict[str, list[tuple[float, float]]] = {}
    for round_number in range(args.rounds + 1):
        for name, messages in load_prompts(None).items():
            ids = pipe.encode(messages)
            ours = pipe.generate(ids, max_new_tokens=args.tokens, ignore_eos=True).stats.tokens_per_second
            assert ours is not None
            genai.stdin.write(json.dumps({"ids": ids, "new_tokens": args.tokens}) + "\n")
            genai.stdin.flush()
            theirs = (args.tokens - 1) / json.loads(genai.stdout.readline())["seconds"]
            if round_number:  # the first round warms up
                ratios.setdefault(name, []).append(ours / theirs)
                speeds.setdefault(name, []).append((ours, theirs))
    genai.stdin.close()
    genai.wait()
    print(f"{args.precision}, {args.threads} threads, onnxruntime-genai {version}, medians of {args.rounds} rounds")
    for name, values in ratios.items():
        mine, other = (statistics.median(s[i] for s in speeds[name]) for i in (0, 1))
        print(f"{name:12s} kvrelay {mine:6.1f} tok/s  genai {other:6.1f} tok/s  ratio {statistics.median(values):.3f}")
    everything = [r for values in ratios.values() for r in values]
    print(f"{'all':12s} median ratio {statistics.median(everything):.3f}")


if __name__ == "__main__":
    main()
