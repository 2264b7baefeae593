"""`make settings`: docs/settings.md, every setting of a task, from the settings themselves.

Run it when a setting comes, goes, or has other words, bounds or defaults. tests/muster/test_settings_at_each_door.py
holds the document.
"""

from pathlib import Path

from coordinator.dashboard.settings_table import groups
from fedcore.validation import Setting
from muster.markdown import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"
INTRODUCTION = """# Settings of a task

Every setting has one name, one range and one default, whoever gives it: `muster task create`, the dashboard's form, the
admin API and `muster.Coordinator.create`. A setting of a part, such as `secagg.bits`, is

* `--secagg --bits 12` on the command line, and for `requires`, `on_device`, `schedule` and `privacy` a pair, as in
  `--privacy epsilon=8,delta=1e-6`;
* the field `secagg.bits` of the form;
* `{"secagg": {"bits": 12}}` in JSON, and `secagg={"bits": 12}` in Python.

`make settings` writes this page.
"""


def document() -> str:
    """The document: a table for a task's own settings, and one for each part."""
    chapters = [INTRODUCTION]
    for group in groups():
        rows = [
            [f"`{setting.name}`", setting.about, setting.allowed, "required" if setting.required else _default(setting)]
            for setting in group.settings
        ]
        head = f"## `{group.name}`\n\n{group.about}" if group.name else "## The task"
        without = " By default a task has none." if group.optional else ""
        chapters.append(f"{head}{without}\n\n{table(['setting', 'what', 'may be', 'default'], rows)}")
    return "\n".join(chapters)


def _default(setting: Setting) -> str:
    return f"{setting.default}".lower() if setting.kind == "flag" else setting.shown_default or "–"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
