"""SQL that is written once in this process, for every database of a kind.

SQLAlchemy writes a statement once for each engine, of which every test opens its own: that is an eighth of their time.
"""

from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

ROOM = 5000


def statements_written_once(patch):
    """From now on, until `patch` is undone, all engines share what they write; dialects of one kind are one key."""
    written = LRUCache(ROOM)
    shared = property(lambda engine: written, lambda engine, own: None)
    patch.setattr(Engine, "_compiled_cache", shared, raising=False)
    patch.setattr(DefaultDialect, "__eq__", lambda one, other: type(one) is type(other))
    patch.setattr(DefaultDialect, "__hash__", lambda one: hash(type(one)))
