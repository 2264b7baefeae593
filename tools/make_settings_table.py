"""`make settings`: docs/settings.md, every setting of a task and of a simulation, from the settings themselves.

Run it when a setting comes, goes, or has other words, bounds or defaults. tests/muster/test_settings_at_each_door.py
holds the document.
"""

from pathlib import Path

from coordinator.dashboard.settings_table import Group, groups
from fedcore.validation import Setting
from muster.tables import markdown
from simulator.configuration import SimulationConfig

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"
TASK = """# Settings

Every setting has one name, one range and one default, whoever gives it. `make settings` writes this page.

## Of a task

They are those of `muster task create`, the dashboard's form, the admin API and `muster.Coordinator.create`. A setting
of a part, such as `secagg.bits`, is

* `--secagg --bits 12` on the command line, and for `requires`, `on_device`, `schedule` and `privacy` a pair, as in
  `--privacy epsilon=8,delta=1e-6`;
* the field `secagg.bits` of the form;
* `{"secagg": {"bits": 12}}` in JSON, and `secagg={"bits": 12}` in Python.
"""
SIMULATION = """## Of a simulation

They are those of `muster simulate` and its file, the options of `muster sweep`, `muster.simulate` in Python, whose
`users` are the `dataset`, and `SimulationConfig`. A setting of a part is

* `--secagg --bits 12` on the command line, and for `schedule` and `privacy` a pair, as in
  `--privacy epsilon=8,delta=1e-6`; a setting of the algorithm is `--set client_lr=0.1`;
* `bits = 12` under `[secagg]` in a file, and `secagg={"bits": 12}` in Python.
"""


def document() -> str:
    """The document: for tasks and for simulations a table of their own settings, and one for each part."""
    simulation = (chapter(group, " of a simulation") for group in groups(SimulationConfig))
    return "\n".join([TASK, *(chapter(group) for group in groups()), SIMULATION, *simulation])


def chapter(group: Group, whose: str = "") -> str:
    """The table of a group, below its words; a reference to that of a task where it is the same."""
    words = [group.about, "By default there is none." if group.optional else ""]
    head = f"### `{group.name}`{whose}\n\n{' '.join(filter(None, words))}\n\n" if group.name else ""
    if whose and group.settings in [other.settings for other in groups()]:
        return f"{head}Its settings are those of [a task's `{group.name}`](#{group.name}).\n"
    rows = [
        [f"`{setting.name}`", setting.about, setting.allowed, "required" if setting.required else _default(setting)]
        for setting in group.settings
    ]
    return head + markdown(["setting", "what", "may be", "default"], rows)


def _default(setting: Setting) -> str:
    return f"{setting.default}".lower() if setting.kind == "flag" else setting.shown_default or "–"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
