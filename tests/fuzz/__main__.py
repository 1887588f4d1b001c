"""`python -m tests.fuzz --cases 10000 --seed 1`: more cases than CI takes. Prints a table and what was wrong."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import huggingface_hub.constants

from tests.fuzz.harness import Outcome, corpus, drawn, run_all, table
from tests.fuzz.kinds import CORPUS, kinds_in


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds whose name holds this")
    parser.add_argument("--hang-seconds", type=float, default=60.0)
    parser.add_argument("--wrong", type=Path, help="write the cases that went wrong here, as the corpus has them")
    options = parser.parse_args()
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    began, outcomes, wrong = time.monotonic(), list[Outcome](), defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        kinds = [kind for kind in kinds_in(Path(folder)) if not options.only or options.only in kind.name]
        known = [
            (kind, spec)
            for kind, spec in corpus(CORPUS, kinds_in(Path(folder) / "again"))
            if kind.name in {k.name for k in kinds}
        ]
        for outcome in run_all([*known, *drawn(kinds, options.cases, options.seed)], options.hang_seconds):
            outcomes.append(outcome)
            if outcome.wrong:
                wrong[outcome.kind].append(outcome.spec)
                print(f"{outcome.kind}: {outcome.ending}: {json.dumps(outcome.spec)[:600]}\n{outcome.detail}\n", flush=True)
    print(table(outcomes))
    print(f"{len(outcomes):,} cases, {len(known)} of them from the corpus, seed {options.seed}: {time.monotonic() - began:.0f} s")
    if options.wrong:
        options.wrong.write_text(json.dumps(wrong, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
