"""Examples on devices, what SQLite says of all of them together, and what a question's own arithmetic says."""

import math
import sqlite3
from fractions import Fraction

import numpy as np
import torch

from fedcore.algorithms.algorithm import ServerStep, with_carries
from fedcore.plan import Field
from fedcore.questions.answer import answer

FIELDS = (
    Field("x", "float32"),
    Field("v", "float32"),
    Field("y", "uint8", (), 5),
    Field("z", "int32", (), 1000),
    Field("big", "int64", (), 10**9),
    Field("far", "float32"),
    Field("at", "int64", (), 2**31),
    Field("id", "int64", (), 2**53),
    Field("cents", "int32", (), 10**7),
)
FAR = 1_000_000
"""The middle of `far`, whose numbers are ±8 from it. `at` are seconds of two days in 2023, `cents` prices near 20."""
GRID = 8
"""Real numbers are multiples of 1 / GRID between ±8, so that sums of them are exact in float32."""


def devices(seed, count=6, most=12, null=0.2):
    """Rows of `count` devices: columns by field name each. Some devices have none. null: the share of NaN."""
    source = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows = int(source.integers(0, most + 1))
        real = source.integers(-8 * GRID, 8 * GRID + 1, (2, rows)) / GRID
        real[source.random((2, rows)) < null] = math.nan
        found.append(
            {
                "x": real[0].astype(np.float32),
                "v": real[1].astype(np.float32),
                "y": source.integers(0, 5, rows).astype(np.uint8),
                "z": (source.integers(0, 1000, rows) // source.integers(1, 200, rows)).astype(np.int32),
                "big": source.integers(0, 10**9, rows),
                "far": (FAR + source.integers(-8 * GRID, 8 * GRID + 1, rows) / GRID).astype(np.float32),
                "at": 1_700_000_000 + source.integers(0, 172_800, rows),
                "id": source.integers(2**52, 2**53, rows),
                "cents": (1999 + source.integers(-2, 3, rows)).astype(np.int32),
            }
        )
    return found


class _Moments:
    """VARIANCE and its like, exactly."""

    def __init__(self):
        self.values = []

    def step(self, value):
        if value is not None:
            self.values.append(Fraction(value))

    def spread(self, less):
        if len(self.values) <= less:
            return None
        mean = sum(self.values) / len(self.values)
        return float(sum((value - mean) ** 2 for value in self.values) / (len(self.values) - less))


def _moment(less, root):
    def finalize(self):
        spread = self.spread(less)
        return spread if spread is None or not root else math.sqrt(spread)

    return type("Moment", (_Moments,), {"finalize": finalize})


def clip(value, low, high):
    return None if value is None else max(min(value, high), low)


def width_bucket(value, low, high, count):
    if value is None:
        return None
    edges = [low + (high - low) * (index / count) for index in range(count)] + [high]
    return sum(edge <= value for edge in edges)


def database(rows):
    """All rows in one table with a column DEVICE."""
    connection = sqlite3.connect(":memory:")
    kinds = (f"{field.name} {'REAL' if field.dtype == 'float32' else 'INTEGER'}" for field in FIELDS)
    connection.execute(f"CREATE TABLE examples (device INTEGER, {', '.join(kinds)})")
    for device, columns in enumerate(rows):
        values = zip(*(columns[field.name].tolist() for field in FIELDS), strict=True)
        connection.executemany(
            f"INSERT INTO examples VALUES (?{', ?' * len(FIELDS)})",
            ([device, *(None if math.isnan(value) else value for value in row)] for row in values),
        )
    connection.create_function("CLIP", 3, clip)
    connection.create_function("WIDTH_BUCKET", 4, width_bucket)
    for name, less, root in [
        ("VARIANCE", 1, False), ("VAR_POP", 0, False), ("STDDEV", 1, True), ("STDDEV_POP", 0, True),
    ]:  # fmt: skip
        connection.create_aggregate(name, 1, _moment(less, root))
    return connection


def summed(asked, columns, batch_size):
    """The rows' numbers of a device, added up as a step of the graph does: (batches, R) float32."""
    rows = len(next(iter(columns.values())))
    tensors = {field.name: torch.from_numpy(columns[field.name]) for field in asked.fields}
    numbers = asked.rows(tensors).numpy() if rows else np.zeros((0, asked.question.row_numbers), np.float32)
    assert numbers.dtype == np.float32
    assert numbers.shape == (rows, asked.question.row_numbers)
    assert np.isfinite(numbers).all()
    return [numbers[start : start + batch_size].sum(0) for start in range(0, rows, batch_size)]


def answered(asked, rows, batch_size=5):
    """The answer of devices that all report in one round, in float32 as on devices, without a graph."""
    return told(asked, reports(asked, rows, batch_size))


def trip_of(algorithm):
    """The only trip of an algorithm of one."""
    (trip,) = getattr(algorithm, "trips", (algorithm,))
    return trip


def reports(asked, rows, batch_size=5, algorithm=None):
    """The report of every device by name, float32. algorithm: in place of the question's own."""
    algorithm = algorithm or asked.algorithm()
    trip = trip_of(algorithm)
    (stage,) = trip.passes
    size = 2 * (1 + sum(asked.question.block_sizes.values()))
    broadcast = trip.broadcast(algorithm.init(np.zeros(size, np.float32)))
    received = with_carries(broadcast, {})
    found = []
    for columns in rows:
        carry = stage.begin(received)
        for numbers in summed(asked, columns, asked.question.most_rows or batch_size):
            sums = np.concatenate([[0, 0], numbers]).astype(np.float32)
            carry = stage.step(carry, received, lambda params, sums=sums: sums)
        found.append({name: np.asarray(one) for name, one in trip.report(broadcast, {stage.name: carry}).items()})
    return found


def told(asked, of_devices, deviation=0.0):
    """The answer from the reports of devices."""
    algorithm = asked.algorithm()
    size = 2 * (1 + sum(asked.question.block_sizes.values()))
    state = algorithm.init(np.zeros(size))
    mean = {name: np.mean([report[name].astype(np.float64) for report in of_devices], 0) for name in of_devices[0]}
    params = trip_of(algorithm).update(state, mean, ServerStep(devices=len(of_devices)))["params"]
    return answer(asked.question, params.astype(np.float32), deviation)
