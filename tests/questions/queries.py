"""Queries of the subset, drawn at random, as text with as few parentheses as SQLite needs."""

from dataclasses import dataclass, replace

# How tightly what is written holds together, as in https://sqlite.org/lang_expr.html
OR, AND, NOT, EQUAL, LESS, SUM, PRODUCT, SIGN, ATOM = range(9)
ROWS = 80
"""More than all devices have together."""
EXACT = 2**23
NOTHING = "0 * COUNT(*)"
"""The scale of what has no error."""


@dataclass(frozen=True)
class Written:
    """SQL, how tightly it holds together, and what is known of its number.

    reach: the largest it may be. grid: it is a multiple of 2^-grid; None if it may be any real number. loose: IN,
    BETWEEN or NOT, which must stand in parentheses beside a comparison.
    """

    text: str
    hold: int = ATOM
    reach: float = 1
    grid: int | None = 0
    real: bool = False
    loose: bool = False

    def within(self, hold, tight=False):
        """In parentheses unless it holds together tightly enough."""
        bare = self.hold > hold or (self.hold == hold and not tight)
        return self.text if bare and not (self.loose and hold in {EQUAL, LESS}) else f"({self.text})"

    def exact(self, noise):
        """Whether the sum of it over all rows is exact: of what float32 holds, and without noise of whole numbers."""
        whole = not (self.real or noise)
        return whole or (self.grid is not None and self.reach * 2**self.grid * ROWS < EXACT)


FIELDS = {
    "x": Written("x", reach=8, grid=3, real=True),
    "v": Written("v", reach=8, grid=3, real=True),
    "y": Written("y", reach=4),
    "z": Written("z", reach=999),
    "big": Written("big", reach=10**9),
    "far": Written("far", reach=1_000_008, grid=3, real=True),
    "at": Written("at", reach=2**31),
    "id": Written("id", reach=2**53),
    "cents": Written("cents", reach=10**7),
}


class Queries:
    """Draws queries. source: `random.Random`. bounded: real fields are clipped to what they hold."""

    def __init__(self, source, *, bounded=False):
        self.source, self.bounded = source, bounded

    def pick(self, *options):
        return self.source.choice(options)

    def chance(self, share):
        return self.source.random() < share

    def field(self):
        found = FIELDS[self.pick("x", "x", "v", "y", "y", "z", "big", "far", "at", "id", "cents")]
        text = found.text.upper() if self.chance(0.1) else found.text
        ends = "-8, 8" if found.reach == 8 else "999990, 1000010"
        return replace(found, text=f"CLIP({text}, {ends})" if self.bounded and found.real else text)

    def number(self):
        if self.chance(0.1):
            return Written("NULL")
        if self.chance(0.4):
            value = self.source.randrange(-24, 25) / 8
            return Written(str(value), SIGN if value < 0 else ATOM, abs(value), 3, True)
        value = self.source.randrange(-3, 8)
        return Written(str(value), SIGN if value < 0 else ATOM, abs(value))

    def expression(self, depth):
        """A number of a row."""
        if depth == 0 or self.chance(0.25):
            return self.field() if self.chance(0.75) else self.number()
        make = self.pick(
            self.arithmetic, self.arithmetic, self.arithmetic, self.quotient, self.quotient, self.case, self.function,
            self.function, self.negative, self.condition, self.bucket,
        )  # fmt: skip
        return make(depth - 1)

    def arithmetic(self, depth):
        sign = self.pick("+", "-", "*")
        left, right = self.expression(depth), self.expression(depth)
        hold = PRODUCT if sign == "*" else SUM
        text = f"{left.within(hold)} {sign} {right.within(hold, tight=True)}"
        grids = [left.grid, right.grid]
        grid = None if None in grids else sum(grids) if sign == "*" else max(grids)
        reach = left.reach * right.reach if sign == "*" else left.reach + right.reach
        return Written(text, hold, reach, grid, left.real or right.real)

    def quotient(self, depth):
        left, right = self.expression(depth), self.expression(depth)
        sign = self.pick("/", "%")
        if sign == "%" and (left.real or right.real):
            left, right = (replace(one, text=f"CLIP({one.text}, -50, 50)", hold=ATOM) for one in (left, right))
        text = f"{left.within(PRODUCT)} {sign} {right.within(PRODUCT, tight=True)}"
        real = left.real or right.real
        return Written(text, PRODUCT, left.reach if not real else 1e6, None if real and sign == "/" else 0, real)

    def negative(self, depth):
        inner = self.expression(depth)
        return replace(inner, text=f"- {inner.within(SIGN)}", hold=SIGN, loose=False)

    def case(self, depth):
        values = [self.expression(depth) for _ in range(self.pick(1, 2))]
        last = self.expression(depth) if self.chance(0.7) else None
        if self.chance(0.3):
            subject = self.expression(depth)
            branches = [f"WHEN {self.number().text} THEN {value.text}" for value in values]
            text = f"CASE {subject.text} {' '.join(branches)}"
        else:
            text = "CASE " + " ".join(f"WHEN {self.condition(depth).text} THEN {value.text}" for value in values)
        return self.one_of(f"{text}{f' ELSE {last.text}' if last else ''} END", *values, *([last] if last else []))

    @staticmethod
    def one_of(text, *values):
        grids = [value.grid for value in values]
        grid = None if None in grids else max(grids)
        return Written(text, ATOM, max(value.reach for value in values), grid, any(value.real for value in values))

    def function(self, depth):
        one, other = self.expression(depth), self.expression(depth)
        name = self.pick("COALESCE", "IFNULL", "MIN", "MAX", "NULLIF", "ABS", "CLIP", "ROUND", "REAL", "INTEGER", "IIF")
        if name in {"COALESCE", "IFNULL", "MIN", "MAX", "NULLIF"}:
            return self.one_of(f"{name}({one.text}, {other.text})", one, other)
        if name in {"IIF", "ABS"}:
            text = (
                f"ABS({one.text})" if name == "ABS" else f"IIF({self.condition(depth).text}, {one.text}, {other.text})"
            )
            return self.one_of(text, one, other)
        low, high = self.pick((-3, 4), (0, 1), (-2.5, 2.5), (1, 5))
        clipped = f"CLIP({one.text}, {low}, {high})"
        if name == "CLIP":
            real = one.real or isinstance(low, float)
            return Written(
                clipped, ATOM, 5, 1 if one.grid == 0 else None if one.grid is None else max(one.grid, 1), real
            )
        if name == "ROUND":
            return Written(f"ROUND({clipped})", ATOM, 5, 0, True)
        return Written(
            f"CAST({clipped} AS {name})",
            ATOM,
            5,
            0 if name == "INTEGER" else one.grid and max(one.grid, 1),
            name == "REAL",
        )

    def bucket(self, depth):
        low, high, count = self.pick((0, 1, 4), (-5.5, 5.5, 3), (0, 1000, 7))
        number = self.expression(depth) if self.chance(0.5) else self.field()
        return Written(f"WIDTH_BUCKET({number.text}, {low}, {high}, {count})", ATOM, count + 1)

    def condition(self, depth):
        """A truth of a row, which is a number too."""
        depth = max(depth - 1, 0)
        make = self.pick("compare", "compare", "compare", "between", "in", "null", "and", "or", "not")
        if make == "compare":
            sign = self.pick("=", "==", "<>", "!=", "<", "<=", ">", ">=")
            hold = LESS if sign[0] in "<>" and sign != "<>" else EQUAL
            left, right = self.expression(depth), self.expression(depth)
            return Written(f"{left.within(hold)} {sign} {right.within(hold, tight=True)}", hold)
        if make == "not":
            return Written(f"NOT {self.condition(depth).within(NOT)}", NOT, loose=True)
        if make in {"and", "or"}:
            hold = OR if make == "or" else AND
            left, right = self.condition(depth), self.expression(depth) if self.chance(0.2) else self.condition(depth)
            return Written(f"{left.within(hold)} {make.upper()} {right.within(hold, tight=True)}", hold)
        return self.named(make, depth)

    def named(self, make, depth):
        """BETWEEN, IN or IS NULL."""
        first, negated = self.expression(depth).within(EQUAL, tight=True), self.pick("", "NOT ")
        if make == "between":
            low, high = (self.expression(depth).within(LESS, tight=True) for _ in range(2))
            return Written(f"{first} {negated}BETWEEN {low} AND {high}", EQUAL, loose=True)
        if make == "in":
            values = ", ".join(self.expression(depth).text for _ in range(self.pick(1, 2, 3)))
            return Written(f"{first} {negated}IN ({values})", EQUAL, loose=True)
        return Written(f"{first} IS {negated}NULL", EQUAL)

    def key(self):
        """A key of groups, of few values."""
        return self.pick(
            "y", "y", "y + 1", "y > 2", "z % 7", "- y", "big / 100000000", "WIDTH_BUCKET(x, -8, 8, 4)", "x IS NULL",
            "CASE WHEN x > 0 THEN 'more' WHEN x < 0 THEN 'less' END", "CASE WHEN z > 20 THEN 1.5 ELSE -2.5 END",
            "CAST(CLIP(v, -2, 2) AS INTEGER)", "COALESCE(CAST(CLIP(x, -1, 1) AS INTEGER), 7)", "x > v AND y < 3",
        )  # fmt: skip

    def aggregate(self):
        """An aggregate, whether its number is exact, and the sum that its error is measured by."""
        name = self.pick(
            "COUNT(*)", "COUNT", "COUNT", "DEVICES", "SUM", "SUM", "SUM", "TOTAL", "AVG", "AVG", "MIN", "MAX", "SPREAD",
        )  # fmt: skip
        extra = f" FILTER (WHERE {self.condition(1).text})" if self.chance(0.2) else ""
        inner = self.expression(self.pick(0, 1, 2))
        scale = f"SUM(ABS({inner.text})){extra}"
        if name == "COUNT(*)":
            return f"COUNT(*){extra}", True, NOTHING
        if name == "DEVICES":
            return f"COUNT(DISTINCT DEVICE){extra}", True, NOTHING
        if name in {"MIN", "MAX"}:
            inner = self.pick("y", "z", "z - 500", "y * 3", "- y", "z / 10", "x > 1")
            return f"{name}({inner}){extra}", True, NOTHING
        if name == "SPREAD":
            name = self.pick("VARIANCE", "VAR_POP", "STDDEV", "STDDEV_POP")
            inner = self.pick("CLIP(x, -8, 8)", "y", "z", "CLIP(x, -8, 8) * y")
            if self.bounded:  # noise, or none, is added to sums in float32
                return f"{name}({inner}){extra}", False, f"TOTAL(({inner}) * ({inner})){extra}"
            far = "CLIP(far, 0, 10000000)", "CLIP(far, -1e8, 1e8)", "at", "- at", "id", "cents", "cents - 5000000"
            text = f"{name}({self.pick(inner, *far)}){extra}"
            return text, False, text
        return f"{name}({inner.text}){extra}", inner.exact(self.bounded), scale

    def column(self, keys):
        """A column, and the sum that its error is measured by."""
        if keys and self.chance(0.1):
            return self.pick(*keys), NOTHING
        text, exact, scale = self.aggregate()
        if not exact or self.chance(0.5):
            return text, scale
        other = None
        while other is None:
            other, exact, _ = self.aggregate()
            other = other if exact else None
        form = self.pick(
            "{} + {}", "{} - {}", "{} / {}", "{} % {}", "{} * {}", "COALESCE({}, {})",
            "CASE WHEN {} > {} THEN 1 ELSE 0 END",
            "{} < {}", "NULLIF({}, {})", "MIN({}, {})", "{} IS NULL OR {} > 1", "CAST({} AS REAL) / {}",
            "{} BETWEEN 0 AND {}", "CASE {} WHEN {} THEN 'same' ELSE 'other' END", "- ({} + {})", "{} IN (1, 2, {})",
        )  # fmt: skip
        return form.format(text, other), f"1e-3 * (ABS({text}) + ABS({other}))"

    def query(self):
        """A query, one with a column for each of its scales, and whether its rows have an order."""
        keys = list(dict.fromkeys(self.key() for _ in range(self.pick(0, 1, 1, 1, 2))))
        columns = [self.column(keys) for _ in range(self.pick(1, 1, 2, 3))]
        where = f" WHERE {self.condition(self.pick(1, 2)).text}" if self.chance(0.5) else ""
        tail = f" FROM examples{where}"
        shown = [f"{key} AS key_{index}" for index, key in enumerate(keys)]
        if keys:
            how = self.pick("alias", "number", "text")
            names = {"alias": [f"key_{i}" for i in range(len(keys))], "number": [str(i + 1) for i in range(len(keys))]}
            tail += " GROUP BY " + ", ".join(names.get(how, keys))
            if self.chance(0.3):
                least = self.pick(1, 2, 4)
                columns = columns if least == 1 else [("COUNT(*)", NOTHING)]  # others hide what fewer devices add
                tail += f" HAVING COUNT(DISTINCT DEVICE) >= {least}"
            if self.chance(0.5):
                tail += " ORDER BY " + ", ".join(f"key_{i}{self.pick('', ' DESC')}" for i in range(len(keys)))
                tail += self.pick("", f" LIMIT {self.pick(1, 3)}")
        text = f"SELECT {', '.join((*shown, *(column for column, _ in columns)))}{tail}"
        scales = f"SELECT {', '.join((*shown, *(scale for _, scale in columns)))}{tail}"
        return text, scales, "ORDER BY" in tail
