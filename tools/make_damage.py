"""Damaged inputs, a million for every reader of what strangers send, and what became of them.

    python -m tools.make_damage > benchmarks/results/damaged-inputs-DATE.json

An error that is not the reader's own ends the run.
"""

import argparse
import json
import sys
import time

from muster.output import header
from secagg.errors import SecaggError
from tests.damage import outcomes
from tests.secagg.test_messages import CASES, exact
from tests.test_damaged_inputs import READERS


def main():
    """Damage the inputs of every reader, and print what became of them as JSON."""
    parser = argparse.ArgumentParser(description="Damage what strangers send, and count what becomes of it.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each reader")
    inputs = parser.parse_args().inputs
    messages = {f"secagg {name}": (data, exact(*pair), SecaggError) for name, (data, *pair) in CASES.items()}
    done, began = {}, time.process_time()
    for name, (data, read, refusal) in (READERS | messages).items():
        done[name] = dict(outcomes(data, read, refusal, inputs).most_common())
        print(name, done[name], file=sys.stderr, flush=True)
    cpu_s = round(time.process_time() - began, 1)
    print(json.dumps({**header("damaged_inputs"), "inputs_each": inputs, "cpu_s": cpu_s, "done": done}))


if __name__ == "__main__":
    main()
