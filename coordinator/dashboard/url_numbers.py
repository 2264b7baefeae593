"""Numbers in the addresses of pages, no larger than the columns of the database that they are compared with."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
"""Of a round, or of an attempt at one."""
RowId: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
