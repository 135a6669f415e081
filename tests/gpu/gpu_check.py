"""Check kvrelay on a box with a GPU: right, lossless, without copies, captured, and how fast.

    make gpu-check-bundle      # on a workstation: graphs and a recipe for the weights, a few MiB
    make gpu-check             # on the box, with numpy, the runtime and onnxruntime-gpu or tensorrt, and cuda-python

Every place that the box has is checked; what is missing is skipped with the reason. A summary goes to standard output,
all figures to a JSON file; the exit code is 1 if a check failed. The weights come from a seed: times are those of the
default model's geometry, acceptance is that of a made-up model. Building plans is not counted among the checks' time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

import fast
import right
from kvrelay import KvrelayError
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.cli.box_report import box_report
from kvrelay.dialects import refusal
from kvrelay.gpu import gpus
from kvrelay.identity import library_version
from kvrelay.ort.providers import check_providers
from kvrelay.place import Place, place_of
from kvrelay.trt.build import Build
from kvrelay.trt.library import Backend
from seeded import RECIPE, make_weights
from setting import Outcome, Setting

PLACES = (("onnxruntime", "cuda"), ("onnxruntime", "tensorrt"), ("tensorrt", None), ("tensorrt-rtx", None))
_MAX_BATCH = 8


def main() -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, help="folder that `make gpu-check-bundle` wrote")
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"), help="JSON file of all figures")
    parser.add_argument("--place", help='one place only: "onnxruntime:cpu" proves the script on any box')
    parser.add_argument("--seconds", type=float, default=240, help="no check begins later")
    given = parser.parse_args()
    os.environ.setdefault("KVRELAY_CACHE", str(given.bundles.resolve() / "cache"))
    report = box_report()
    for name, value in report.items():
        print(f"{name}: {value}")
    outcomes: dict[str, list[Outcome]] = {}
    spent = 0.0
    for place, why in _places(given.place):
        for name in ("standard", "decomposed"):
            label = f"{place}, {name}"
            print(f"\n{label}", flush=True)
            bundle = Outcome("all", "skipped", why) if why else _open(given.bundles / name, place)
            if isinstance(bundle, Outcome):
                outcomes[label] = [_said(bundle)]
                continue
            outcomes[label] = []
            started = time.monotonic()
            setting = Setting(bundle, place, _progress)
            for check in (*right.CHECKS, *fast.CHECKS):
                late = spent + time.monotonic() - started > given.seconds
                outcomes[label].append(_said(_skipped_late(check.__name__) if late else _run(check, setting)))
            spent += time.monotonic() - started
            given.output.write_text(json.dumps(_as_json(report, outcomes), indent=1) + "\n")  # a crash keeps these
    given.output.write_text(json.dumps(_as_json(report, outcomes), indent=1) + "\n")
    return _summary(outcomes, spent)


def _places(only: str | None) -> list[tuple[Place, str | None]]:
    """Return places with the reason why each cannot be checked, None where it can."""
    wanted = PLACES if only is None else [cast("tuple[str, str | None]", (*only.split(":"), None)[:2])]
    found = []
    for backend, provider in wanted:
        place = place_of(backend, provider)
        try:
            library_version(place)
            if place.on_gpu:
                gpus()
            if place.providers:
                check_providers(place.providers)
        except KvrelayError as error:
            found.append((place, str(error)))
        else:
            found.append((place, None))
    return found


def _open(folder: Path, place: Place) -> Bundle | Outcome:
    """Make the weights of a bundle, open it, and build its plans; or say why it cannot be checked."""
    if not (folder / RECIPE).exists():
        missing = f"no bundle at {folder}: make it on a workstation with `make gpu-check-bundle`"
        return Outcome("all", "skipped", missing)
    try:
        make_weights(folder)
        bundle = open_bundle(folder)
        if why := refusal(bundle.manifest.engines[0].dialect, place.backend, library_version(place)):
            return Outcome("all", "skipped", why)
        if place.backend != "onnxruntime":
            _build(bundle, place.trt_backend)
    except KvrelayError as error:
        return Outcome("all", "skipped", str(error))
    except Exception:  # a fault of a library while it builds: the other places still say something
        traceback.print_exc()
        return Outcome("all", "failed", traceback.format_exc(limit=-1).splitlines()[-1])
    return bundle


def _build(bundle: Bundle, backend: Backend) -> None:
    started = time.monotonic()
    work = Build(bundle, backend, "current", max_batch=_MAX_BATCH, progress=_progress)
    missing = work.missing()
    for entry in missing:
        work.build(entry)
    print(f"  built {len(missing)} plans in {time.monotonic() - started:.0f} s", flush=True)


def _run(check: Callable[[Setting], Outcome], setting: Setting) -> Outcome:
    try:
        return check(setting)
    except KvrelayError as error:
        return Outcome(check.__name__, "failed", str(error))
    except Exception:  # a fault of the script or of a library: the other checks still say something
        traceback.print_exc()
        return Outcome(check.__name__, "failed", traceback.format_exc(limit=-1).splitlines()[-1])


def _skipped_late(name: str) -> Outcome:
    return Outcome(name, "skipped", "the time is up: --seconds")


def _said(outcome: Outcome) -> Outcome:
    print(f"  {outcome.status}: {outcome.check}: {outcome.detail}", flush=True)
    return outcome


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"    {line}", file=sys.stderr, flush=True)


def _as_json(report: dict[str, str], outcomes: dict[str, list[Outcome]]) -> dict[str, object]:
    return {"box": report, "places": {label: [asdict(o) for o in mine] for label, mine in outcomes.items()}}


def _summary(outcomes: dict[str, list[Outcome]], spent: float) -> int:
    every = [o for mine in outcomes.values() for o in mine]
    run = [o for o in every if o.status != "skipped"]
    failed = [o for o in run if o.status == "failed"]
    print(f"\n{len(run)} run, {len(failed)} failed, {len(every) - len(run)} skipped, {spent:.0f} s of checks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
