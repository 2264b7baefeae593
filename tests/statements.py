"""SQL that is written once in this process, for every database of a kind.

SQLAlchemy writes a statement once for each engine, of which every test opens its own: that is an eighth of their time.
"""

from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

ROOM = 5000


def write_statements_once():
    """From now on all engines of this process share what they write; dialects of one kind are one key."""
    written = LRUCache(ROOM)
    Engine._compiled_cache = property(lambda engine: written, lambda engine, own: None)
    DefaultDialect.__eq__ = lambda one, other: type(one) is type(other)
    DefaultDialect.__hash__ = lambda one: hash(type(one))
