"""Built-in questions: what is asked first of devices, by a word in place of SQL.

    sizes              how many rows devices have: devices by bins of doubling size, all rows, and their mean
    labels x           rows and devices by each value of a whole field
    histogram x        rows and devices by bins of a field
    quantiles x        10, 25, 50, 75 and 90 %, and the least and the greatest value that enough devices have, by bins
    normaliser x       mean and standard deviation, of each element or of all, as the inputs of a model need them
    correlation x y    Pearson's correlation of two fields

Of a field that is an array every element counts. NaN and infinity are NULL, which is in no bin and no mean, as are
labels that are ignored and what fills a text's tokens. Without noise a mean, a deviation and a correlation are hidden
unless as many devices as a group needs have values within the bounds: what is held to one is the same on all. Bytes in
a row may be a text with zeros behind it, and are asked about only within bounds. What bounds a device's part of an
answer is in `export.questions.draft`.

In words, options are KEY=VALUE, two values with a comma between, and the end is that of SQL:

    muster ask histogram duration_s low=0 high=600 bins=12 MAX 20 ROWS PER DEVICE

A mean is computed of units of half the range from its middle, so that neither float32 on a device nor quantisation
loses digits to an offset: with u = (x − middle) / half, mean = middle + half · E[u], and the deviation is
half · √(E[u²] − E[u]²). Values in a small part of their bounds far from the middle make E[u²] and E[u]² near: a
deviation that rounding could make up, less than a 128th of the mean's distance from the middle, is NULL; under masks,
which round sums of up to n rows, less than √n / 1,024 of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from export.questions import draft as drafts
from export.questions.asked import CompiledQuestion
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.question import MOST_CELLS, Call, Column, Group, Key, Number, Shown, Value
from fedcore.validation import offered

LARGEST_SIZE = 2**16
"""Rows of a device, from which on sizes are in one bin, unless it is said."""
BINS, FINE_BINS = 20, 100
PERCENTILES = (10, 25, 50, 75, 90)
_BOUNDS = "low", "high"
NORMALISER = "field", "element", "mean", "deviation", "values"
"""The columns of a normaliser."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A question by its word.

    of: names of fields. bins: of a histogram or quantiles. low, high: bounds of each field, of a normaliser also of
    each element, or the largest size as `high`; values outside are held to them, those of a histogram are in bins of
    their own. overall: one pair of numbers for all elements of an array. most_rows: of a device that count, drawn at
    random.
    """

    word: str
    of: tuple[str, ...] = ()
    bins: int | None = None
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    overall: bool = False
    most_rows: int | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> BuiltIn:
        """The question in words. Raises QuestionError."""
        (first, *rest), given, most_rows = drafts.taken_apart(words, ("bins=", "low=", "high=", "overall"))
        try:
            low, high = (tuple(map(_number, given[end].split(","))) if end in given else () for end in _BOUNDS)
            bins = int(given["bins"]) if "bins" in given else None
        except ValueError as error:
            raise QuestionError(f"bins, low and high are numbers, as low=0 high=600 bins=12: {error}") from None
        of = tuple(word for word in rest if word != "overall")
        return cls(first, of, bins=bins, low=low, high=high, overall="overall" in rest, most_rows=most_rows)


def compile_built_in(
    asked: BuiltIn,
    fields: Sequence[Field],
    *,
    minimum_devices: int = 20,
    private: bool = False,
    secure: bool = False,
) -> CompiledQuestion:
    """The question to devices that have these fields.

    private: noise is to come. secure: reports will be masked. Raises QuestionError for a word or field that is not
    there, an option that the question does not take, and bounds that are missing.
    """
    kind = BUILTIN.get(asked.word)
    if kind is None:
        raise QuestionError(f"no built-in question is called {asked.word!r}; {offered(asked.word, BUILTIN)}")
    if len(asked.of) != kind.fields:
        raise QuestionError(f"{asked.word} asks about {kind.fields} fields, not {len(asked.of)}")
    for option in ("bins", "low", "high", "overall"):
        if getattr(asked, option) not in (None, (), False) and option not in kind.options:
            raise QuestionError(f"{asked.word} takes no {option}")
    terms = drafts.Terms(minimum_devices, asked.most_rows, private, secure)
    chosen = [drafts.field_of(name, fields) for name in asked.of]
    if not chosen:
        return kind.ask(asked, terms, [drafts.Measured.of(drafts.smallest(fields))])
    for field in chosen:
        if field.dtype == "uint8" and len(field.shape) == 1 and not asked.low:
            raise QuestionError(
                f"{field.name} may be a text with zeros behind it, which are no data: ask heavy-hitters {field.name}, "
                "or, if they are numbers, for a histogram, quantiles or a normaliser with low=0 high=255"
            )
    low, high = asked.low or [None] * len(chosen), asked.high or [None] * len(chosen)
    several = len(low) == len(high) == drafts.Measured.of(chosen[0]).elements > 1
    if asked.word == "normaliser" and several and not asked.overall:
        return kind.ask(asked, terms, [drafts.Measured.of_each(chosen[0], asked.low, asked.high)])
    if len(low) != len(chosen) or len(high) != len(chosen):
        raise QuestionError(f"{asked.word} takes one low and one high for each of its fields")
    return kind.ask(asked, terms, [drafts.Measured.of(*ends) for ends in zip(chosen, low, high, strict=True)])


def _sizes(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    """Rows of devices. Its noise and masks need no draw of rows: one device is in one bin, its size held to a bound."""
    field = measured[0].field
    largest, *more = ends = asked.high or (terms.most_rows or LARGEST_SIZE,)
    if more or not (float(largest).is_integer() and largest >= 2):
        raise QuestionError(f"the largest size is a whole number from 2, not {', '.join(map(str, ends))}")
    most = int(largest) if asked.high or terms.most_rows else None
    if terms.private and most is None:
        terms.need_rows()
    edges = [2**power for power in range(1, int(largest).bit_length())]

    def row(given: drafts.Fields) -> Tensor:
        return torch.ones_like(
            given[field.name].reshape(-1, drafts.Measured.of(field).elements)[:, :1], dtype=torch.float32
        )

    draft = drafts.Draft(terms)
    total = draft.counts("total", 1, row, 1, most=most)
    devices, sizes = draft.devices("devices", 1, row, 1), draft.bins(drafts.VOTERS, row, edges)
    columns = (
        Column("from", Group(0)),
        Column("devices", sizes),
        Column("share", Call("/", (Call("real", (sizes,)), devices))),
        Column("rows of all", total),
        Column("mean of all", Call("mean", (total, devices))),
    )
    held = "" if most is None else f" A device with more than {most:,} counts as one with {most:,}."
    text = f"How many examples are on each device, in steps of 1, 2, 4, 8 and so on, and in all?{held}"
    return draft.asked(text, [field], columns, [Key("from", (1, *edges))], drawn=False)


def _labels(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    (of,) = measured
    if not of.whole:
        raise QuestionError(f"{of.field.name} holds real numbers, which have no values to count: ask for its histogram")
    low, high = of.bounds
    bins = drafts.Bins.between(
        of, _few_enough(of, int(high - low) + 1, 3 if terms.secure or of.elements > 1 else 2, "ask for its histogram")
    )
    draft = drafts.Draft(terms)
    columns = (Column(of.field.name, Group(0)), *_counted(draft, bins))
    text = f"How many examples have each value of {of.field.name}, {low:g} to {high:g}, and how many devices?"
    return draft.asked(text, [of.field], columns, [Key(of.field.name, bins.edges[:-1])])


def _histogram(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    (of,) = measured
    outside = not of.whole or bool(asked.low)
    bins = drafts.Bins.between(
        of, _few_enough(of, BINS if asked.bins is None else asked.bins, 3, "ask for fewer bins"), outside
    )
    draft = drafts.Draft(terms)
    begins, ends = zip(*bins.ends, strict=True)
    place = Group(0)
    columns = (
        Column("from", Call("item", (Number(begins), place))),
        Column("to", Call("item", (Number(ends), place))),
        *_counted(draft, bins),
    )
    low, high = of.bounds
    text = f"How many examples have a {of.field.name} in each of {bins.inner} bins from {low:g} to {high:g}?"
    return draft.asked(text, [of.field], columns, [Key("bin", tuple(range(bins.count)))])


def _counted(draft: drafts.Draft, bins: drafts.Bins) -> tuple[Column, ...]:
    """Rows, devices, and the share of rows, by bin: those of the bins that are shown are all."""
    number = bins.counts
    rows = draft.counts("counts", bins.count, number, bins.of.elements)
    devices = draft.devices(drafts.VOTERS, bins.count, number, bins.of.elements)
    share = Call("/", (Call("real", (rows,)), Call("total", (Shown("counts"),))))
    return Column("rows", rows), Column("devices", devices), Column("share", share)


def _quantiles(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    """Quantiles of bins. Under noise there is no least and no greatest value: a few devices have them, by nature."""
    (of,) = measured
    count = FINE_BINS if asked.bins is None else asked.bins
    bins = drafts.Bins.between(of, _few_enough(of, count, 5 if terms.hides else 3, "ask for fewer bins"))
    draft, number = drafts.Draft(terms), bins.counts
    counts = draft.counts("counts", bins.count, number, of.elements)
    begins, ends = (Number(tuple(each)) for each in zip(*bins.ends, strict=True))
    read, places = ("least_with_share", begins) if bins.single else ("quantile", Number(bins.edges))
    shares = [Number(percent / 100) for percent in PERCENTILES]
    found = [Call(read, (counts, share, places)) for share in shares]
    if terms.hides:
        sides = [
            draft.devices(name, bins.count, functools.partial(number, within=within), of.elements)
            for name, within in (("up_to", torch.ge), ("from_on", torch.le))
        ]
        found = [
            drafts.among(terms.minimum_devices, one, counts, share, sides)
            for one, share in zip(found, shares, strict=True)
        ]
    columns = [Column(f"p{percent}", one) for percent, one in zip(PERCENTILES, found, strict=True)]
    if not terms.private:
        seen = draft.devices("seen", bins.count, number, of.elements)
        least, greatest = (
            Call(name, (seen, Number(terms.minimum_devices), values))
            for name, values in (("least", begins), ("greatest", ends))
        )
        columns = [Column("minimum", least), *columns, Column("maximum", greatest)]
    draft.devices(drafts.VOTERS, 1, lambda fields: of.numbers(fields)[1].to(torch.float32).sum(1, keepdim=True), 1)
    columns.append(Column("values", Call("total", (counts,))))
    low, high = of.bounds
    text = f"Below which {of.field.name} are 10, 25, 50, 75 and 90 % of examples, by {bins.count} bins from {low:g} to "
    return draft.asked(f"{text}{high:g}?", [of.field], columns, [])


def _normaliser(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    (of,) = measured
    size = 1 if asked.overall else of.elements
    counted = 1 if of.full else size  # all elements have as many
    bounded = terms.hides and not of.within
    if 2 * size + 2 * counted + (size if bounded else counted) > MOST_CELLS:
        raise QuestionError(f"{of.field.name} has {size:,} elements, too many for one report: say overall")

    def summed(values: Tensor) -> Tensor:
        return values.sum(1, keepdim=True) if size == 1 else values

    def valid(fields: drafts.Fields) -> Tensor:
        return summed(of.units(fields)[1])[:, :counted]

    _, each = of.bounds, of.elements // size  # without bounds large sums cancel
    draft = drafts.Draft(terms)
    values = draft.counts("counts", counted, valid, each, apart=True)
    if bounded:
        draft.devices(drafts.VOTERS, size, lambda fields: summed(of.inside(fields)), size)
    else:
        draft.devices(drafts.VOTERS, counted, valid, counted)
    sums = draft.units("sums", size, lambda fields: summed(of.units(fields)[0]), each)
    squares = draft.units("squares", size, lambda fields: summed(of.units(fields)[0] ** 2), each, low=0)
    variance = "variance_of_all" if terms.private else "variance_if_told"
    deviation = Call("root", (Call(variance, (sums, squares, values, *terms.told)),))
    element: Value = Number(None) if size == 1 else Group(0)
    middle, half = (_of_element([getattr(one, name) for one in of.each or (of,)]) for name in ("middle", "half"))
    mean = Call("+", (middle, Call("*", (half, Call("mean", (sums, values))))))
    cells = Number(of.field.name), element, mean, Call("*", (half, deviation)), values
    columns = [Column(name, value) for name, value in zip(NORMALISER, cells, strict=True)]
    of_each = "" if size == 1 else " of each element"
    held = f"values held to {_bounds_in_words(of)}"
    text = f"What are mean and standard deviation{of_each} of {of.field.name}, of {held}?"
    return draft.asked(text, [of.field], columns, [] if size == 1 else [Key("element", tuple(range(size)))])


def _correlation(asked: BuiltIn, terms: drafts.Terms, measured: Sequence[drafts.Measured]) -> CompiledQuestion:
    one, other = measured
    if one.field == other.field or one.field.shape or other.field.shape:
        raise QuestionError("correlation is of two fields of one number each")
    _ = one.bounds, other.bounds  # without bounds large sums cancel

    def units(fields: drafts.Fields) -> tuple[Tensor, Tensor, Tensor]:
        (x, has_x), (y, has_y) = one.units(fields), other.units(fields)
        return x * has_y, y * has_x, has_x * has_y

    def there(fields: drafts.Fields) -> Tensor:
        return units(fields)[2]

    def inside(fields: drafts.Fields) -> Tensor:
        return one.inside(fields) * other.inside(fields)

    draft = drafts.Draft(terms)
    both = draft.counts("counts", 1, there, 1)
    draft.devices(drafts.VOTERS, 1, inside if terms.hides and not (one.within and other.within) else there, 1)
    products: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
        "x": (lambda x, y: x, -1),
        "y": (lambda x, y: y, -1),
        "xx": (lambda x, y: x * x, 0),
        "yy": (lambda x, y: y * y, 0),
        "xy": (lambda x, y: x * y, -1),
    }

    def of_units(product: Callable[[Tensor, Tensor], Tensor]) -> drafts.RowNumbers:
        return lambda fields: product(*units(fields)[:2])

    sums = [draft.units(name, 1, of_units(product), 1, low=low) for name, (product, low) in products.items()]
    correlation = Call("correlation" if terms.private else "correlation_if_told", (both, *sums, *terms.told))
    columns = (Column("correlation", correlation), Column("rows", both))
    text = f"How do {one.field.name} and {other.field.name} go together (their correlation)?"
    return draft.asked(text, [one.field, other.field], columns, [])


def _bounds_in_words(of: drafts.Measured) -> str:
    runs = [(ends, len(list(run))) for ends, run in groupby((one.low, one.high) for one in of.each or (of,))]
    return ", ".join(f"{low:g} … {high:g}{f' ({count} elements)' if of.each else ''}" for (low, high), count in runs)


def _of_element(numbers: Sequence[float]) -> Value:
    """The number of the element of a group, or that of all."""
    return Call("item", (Number(tuple(numbers)), Group(0))) if len(numbers) > 1 else Number(numbers[0])


def _few_enough(of: drafts.Measured, groups: int, each: int, otherwise: str) -> int:
    """The groups, if a report has room. Raises QuestionError."""
    if groups * each > MOST_CELLS - 8:
        raise QuestionError(
            f"{of.field.name} has {groups:,} groups; there is room for {MOST_CELLS // each:,}: {otherwise}"
        )
    return groups


def _number(text: str) -> float:
    """A number; a whole one to the bit. Raises ValueError."""
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


class _Kind(NamedTuple):
    """A built-in question: how many fields it is about, its options, and what makes it."""

    fields: int
    options: tuple[str, ...]
    ask: Callable[[BuiltIn, drafts.Terms, Sequence[drafts.Measured]], CompiledQuestion]


BUILTIN: Mapping[str, _Kind] = {
    "labels": _Kind(1, (), _labels),
    "histogram": _Kind(1, ("bins", *_BOUNDS), _histogram),
    "quantiles": _Kind(1, ("bins", *_BOUNDS), _quantiles),
    "normaliser": _Kind(1, ("overall", *_BOUNDS), _normaliser),
    "correlation": _Kind(2, _BOUNDS, _correlation),
    "sizes": _Kind(0, ("high",), _sizes),
}
"""By word."""
