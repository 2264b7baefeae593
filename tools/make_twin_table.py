"""`make twin`: the table of docs/performance.md on twins and fleets, written anew from the last result.

    muster bench forecast_fleet --json > benchmarks/results/forecast-fleet-DATE.json && make twin

tests/test_docs.py holds the document against the result.
"""

import re
import textwrap
from pathlib import Path

from benchmarks.forecast_fleet import ForecastFleetOutcome
from fedcore.decoding import decoder
from muster.tables import markdown

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
COLUMNS = {
    "rounds": "rounds",
    "attempts": "attempts",
    "assigned": "assignments",
    "reports": "reports",
    "round_s": "seconds of a round",
    "check_ins": "visits",
}
_OUTCOME = decoder(ForecastFleetOutcome)
_TABLE = re.compile(r"(?<=<!-- made by `make twin` -->\n\n).*?(?=<!-- end -->)", re.DOTALL)


def document() -> str:
    """The document with its table made anew."""
    path = max((ROOT / "benchmarks" / "results").glob("forecast-fleet-*.json"))
    found = _OUTCOME.decode(path.read_bytes())
    rows = []
    for fleet, twins in zip(found.sides[::2], found.sides[1::2], strict=True):
        rows += [
            [side.profile, side.side, *(f"{getattr(side, name):,.5g}" for name in COLUMNS)] for side in (fleet, twins)
        ]
        rows.append(["", "apart", *(f"{found.apart[fleet.profile][name]:+.1%}" for name in COLUMNS)])
    rows.append(["", "tolerance", *(f"{found.tolerances[name]:.0%}" for name in COLUMNS)])
    words = (
        f"{found.devices} devices under each profile for {found.seconds:g} s. The devices took "
        f"{found.cores_used['devices']:.2f} of a core, the coordinators {found.cores_used['coordinators']:.2f}; clocks "
        f"rang {1e3 * found.late_s:.1f} ms late in the mean. `{path.name}`."
    )
    table = markdown(["profile", "side", *COLUMNS.values()], rows)
    return _TABLE.sub(f"{textwrap.fill(words, 120)}\n\n{table}\n".replace("\\", r"\\"), DOCUMENT.read_text())


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
