"""A question about the labels of examples, with every kind of number: counts, words and fractions. Without torch."""

from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Question, Rows

LABELS = 3


def labels(**changes):
    """Devices, rows, whole sums and means by label; `changes` are members of the question."""
    members = {
        "text": "SELECT y, COUNT(DISTINCT DEVICE), COUNT(*) AS n, SUM(steps), AVG(CLIP(speed, 0, 4)) AS speed "
        "FROM examples GROUP BY y",
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
    return Question(**members)
