"""A question that is compiled by hand, with every kind of block: groups, words, bins, fractions and NULLs."""

import torch

from export.questions.asked import Asked
from fedcore.plan import Field
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Question, Rows

LABELS = 3
FIELDS = (Field("steps", "int64", (), 2**31), Field("speed", "float32"), Field("y", "uint8", (), LABELS))


def asked(**changes):
    """Labels with their counts and sums, of devices and of rows; `changes` are members of the question."""
    members = {
        "text": "SELECT y, COUNT(*) AS n, SUM(steps) AS steps, AVG(CLIP(speed, 0, 4)) AS speed FROM examples GROUP BY y",
        "rows": (Rows("n", LABELS), Rows("steps", LABELS, words=True), Rows("known", LABELS), Rows("speed", LABELS)),
        "blocks": (
            Block("voters", "n", "any", 0, 1),
            Block("n", "n", low=0, high=64),
            Block("steps", "steps", low=0, high=2**31 - 1),
            Block("known", "known", low=0, high=64),
            Block("speed", "speed", low=0, high=256, whole=False, norm=256),
        ),
        "columns": (
            Column("y", Group(0)),
            Column("devices", Cell("voters")),
            Column("n", Cell("n")),
            Column("steps", Cell("steps")),
            Column("speed", Call("mean", (Cell("speed"), Cell("known")))),
        ),
        "voters": "voters",
        "keys": (Key("y", tuple(range(LABELS))),),
    } | changes
    return Asked(Question(**members), FIELDS, _rows)


def _rows(fields):
    group = (fields["y"].long()[:, None] == torch.arange(LABELS)).float()
    steps, speed = fields["steps"], fields["speed"]
    high = torch.div(steps, 4096, rounding_mode="floor")
    known = (speed == speed).float()
    held = torch.where(speed == speed, speed.clamp(0, 4), 0.0)
    return torch.cat(
        [group, group * (steps - 4096 * high).float()[:, None], group * high.float()[:, None], group * known[:, None],
         group * held[:, None]], 1
    )  # fmt: skip
