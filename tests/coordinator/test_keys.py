import pytest

from coordinator.errors import KeysDamaged
from coordinator.keys import Keys


def raw(keys):
    return [key.private_bytes_raw() for key in (keys.server, keys.authority)]


def test_keys_are_made_once_two_unlike_ones_for_their_owner_alone(tmp_path):
    path = tmp_path / "m.db.keys"
    made = raw(Keys.at(path))
    assert raw(Keys.at(path)) == made
    assert made[0] != made[1]
    assert [path.name for path in tmp_path.iterdir()] == ["m.db.keys"]
    assert (tmp_path / "m.db.keys").stat().st_mode & 0o077 == 0


def test_a_damaged_file_of_keys_is_not_replaced(tmp_path):
    (tmp_path / "m.db.keys").write_bytes(b"short")
    with pytest.raises(KeysDamaged, match=r"m\.db\.keys"):
        Keys.at(tmp_path / "m.db.keys")
    assert (tmp_path / "m.db.keys").read_bytes() == b"short"
